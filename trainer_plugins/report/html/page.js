"use strict";
// Draw the charts of a page from its data. Text in the data is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 58, BELOW = 20; // pixels of the axes

// --- words and colours ---------------------------------------------------------------------

function size(bytes) {
  const most = Math.abs(bytes);
  if (most >= 2 ** 30) return `${(bytes / 2 ** 30).toFixed(2)} GiB`;
  if (most >= 2 ** 20) return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  return most >= 1024 ? `${(bytes / 1024).toFixed(1)} KiB` : `${bytes} B`;
}

const number = value => value.toLocaleString("en");

function seconds(value) {
  if (value < 0.1) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 120) return `${value < 10 ? +value.toPrecision(2) : value.toFixed(0)} s`;
  return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

const TEXTS = { bytes: size, s: seconds };
const CLOCK = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const inks = new Map();
function ink(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`));
  return inks.get(name);
}

function round(span, most) { // the smallest of 1, 2, 5, 10 and so on that needs at most `most` ticks
  let step = 10 ** Math.floor(Math.log10(span / most || 1));
  for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= most) return step * factor;
}

function ticks(low, high, step) {
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

function heightTicks(low, high, unit, most) { // in the unit to which the numbers are rounded
  if (unit === "s") return ticks(low, high, round(high - low, most)).map(at => [at, `${+at.toPrecision(6)} s`]);
  const [name, per] = high - low >= 2 ** 30 ? ["GiB", 2 ** 30] : high - low >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 1024];
  const step = round((high - low) / per, most);
  return ticks(low / per, high / per, step).map(at => [at * per, `${+at.toPrecision(6)} ${name}`]);
}

function stepTicks(source, begin, end, most) { // places at a round number of steps; none within one step
  const { edges, steps } = source, found = [];
  if (!steps?.length) return found;
  const first = source.stretch(begin), last = source.stretch(end);
  if (steps[last] - steps[first] < 2) return found;
  const step = Math.max(1, round(steps[last] - steps[first], most));
  let next = Math.ceil(steps[first] / step) * step;
  for (let at = first; at <= last; at++) for (; next <= steps[at]; next += step) found.push([edges[at + 1], number(next)]);
  return found;
}

function widthTicks(low, high, axis, most) {
  if (axis === "moments") return [];
  if (axis !== "seconds") return ticks(low, high, Math.max(1, round(high - low, most))).map(at => [at, number(at)]);
  const step = CLOCK.find(each => (high - low) / each <= most) ?? 86400 * round((high - low) / 86400, most);
  const fine = high - low < 1 ? round(high - low, most) : step;
  const [name, per] = fine % 86400 === 0 ? ["d", 86400] : fine % 3600 === 0 ? ["h", 3600] : fine % 60 === 0 ? ["min", 60] : ["s", 1];
  return ticks(low, high, fine).map(at => [at, `${+(at / per).toPrecision(6)} ${name}`]);
}

// --- a picture -----------------------------------------------------------------------------

const pictures = new Set(); // redrawn when colours or widths change

class Picture {
  constructor(parent, label, pixels, draw) {
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": label });
    this.pixels = pixels;
    this.draw = draw;
    parent.append(this.canvas);
    pictures.add(this);
    new ResizeObserver(() => this.again()).observe(parent);
  }

  again() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; this.now(); });
  }

  now() {
    this.width = Math.floor(this.canvas.parentElement.clientWidth);
    if (!this.width) return;
    const sharp = devicePixelRatio || 1, canvas = this.canvas;
    canvas.width = this.width * sharp;
    canvas.height = this.pixels * sharp;
    canvas.style.height = `${this.pixels}px`;
    const context = canvas.getContext("2d");
    context.scale(sharp, sharp);
    context.font = "12px system-ui, sans-serif";
    this.draw(context, this.width, this.pixels);
  }

  place(event) { // the pointer, in pixels of the picture
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { inks.clear(); pictures.forEach(each => each.again()); });

class View { // the visible part of an axis; the charts of a run share one
  constructor(low, high, least) { Object.assign(this, { low, high, least, begin: low, end: high, listeners: [] }); }

  show(begin, end) {
    const width = Math.min(Math.max(end - begin, this.least), this.high - this.low);
    this.begin = Math.min(Math.max(begin, this.low), this.high - width);
    this.end = this.begin + width;
    this.listeners.forEach(each => each());
  }

  get width() { return this.end - this.begin; }
  zoom(factor, at = (this.begin + this.end) / 2) { this.show(at - (at - this.begin) * factor, at + (this.end - at) * factor); }
  pan(part) { this.show(this.begin + part * this.width, this.end + part * this.width); }
  all() { this.show(this.low, this.high); }
}

// --- a chart over time ---------------------------------------------------------------------

// A source has an axis, a unit, `top`, `named(at)` (its areas and lines for the key, with their figures there) and
// `sample(begin, end, columns)` (areas and lines as heights of each column, from bottom to top).
class Chart {
  constructor(figure, source, view, pixels) {
    Object.assign(this, { source, view, low: 0, high: source.top, pointer: null, range: null });
    this.key = make("ul", { class: "key" });
    const frame = make("div", { class: "canvas" });
    this.said = make("p", { class: "said", "aria-live": "polite" });
    figure.append(this.key, frame, ...(source.marks?.length ? [this.marks = make("div", { class: "marks" })] : []), this.said);
    this.picture = new Picture(frame, source.title, pixels + BELOW, (...given) => this.draw(...given));
    this.over = make("canvas", { class: "over", "aria-hidden": "true" });
    frame.append(this.over);
    this.placed = (source.marks ?? []).map(mark => this.mark(mark)).sort(([one], [other]) => one - other);
    view.listeners.push(() => this.picture.again());
    this.listen(this.picture.canvas);
    this.tell(null);
  }

  mark(mark) {
    const made = make(mark.href ? "a" : "span", { class: `mark c-${mark.colour}`, title: mark.title, ...(mark.href ? { href: mark.href } : {}) }, mark.text);
    this.marks.append(made);
    return [mark.at, made];
  }

  x(at) { return LEFT + (at - this.view.begin) / this.view.width * (this.picture.width - LEFT); }
  at(x) { return this.view.begin + Math.min(Math.max((x - LEFT) / (this.picture.width - LEFT), 0), 1) * this.view.width; }
  y(value) { return (this.picture.pixels - BELOW) * (1 - (value - this.low) / (this.high - this.low)); }
  value(y) { return this.low + (1 - y / (this.picture.pixels - BELOW)) * (this.high - this.low); }

  draw(context, width, pixels) {
    const { source, view } = this, bottom = pixels - BELOW, columns = Math.max(width - LEFT, 1);
    const sample = this.sampled = source.sample(view.begin, view.end, columns);
    this.low = this.fits ? Math.max(0, sample.least - 0.05 * (sample.most - sample.least)) : 0;
    this.high = this.fits ? sample.most + 0.05 * (sample.most - this.low) || 1 : source.top;
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, columns, bottom);
    context.clip();
    for (const span of source.spans ?? []) {
      context.globalAlpha = 0.25;
      context.fillStyle = ink(span.colour);
      context.fillRect(this.x(span.begin), 0, Math.max(1, this.x(span.end) - this.x(span.begin)), bottom);
    }
    context.globalAlpha = source.dims?.() ? 0.3 : 1;
    let below = null;
    for (const { colour, heights } of sample.areas) {
      context.fillStyle = ink(colour);
      context.beginPath();
      for (let column = 0; column < columns; column++) {
        const from = this.y(below ? below[column] : 0), to = this.y(heights[column]);
        if (to < from) context.rect(LEFT + column, to, 1, from - to);
      }
      context.fill();
      below = heights;
    }
    context.globalAlpha = 1;
    source.details?.(context, this, sample);
    for (const line of sample.lines) this.line(context, line, columns);
    if (source.limit) this.limit(context, source.limit, width);
    for (const at of source.uprights ?? []) {
      context.fillStyle = ink("bad");
      context.fillRect(this.x(at), 0, 1.5, bottom);
    }
    if (source.dot) this.dot(context, source.dot, width);
    context.restore();
    this.axes(context, width, bottom);
    this.place(width);
    this.overlay();
  }

  place(width) { // marks lie side by side, and below each other only if they would touch
    const ends = [];
    for (const [at, made] of this.placed) {
      made.hidden = at < this.view.begin || at > this.view.end;
      if (made.hidden) continue;
      const x = Math.min(Math.max(this.x(at), LEFT), width - 12), free = ends.findIndex(end => x - end >= 26);
      const row = free < 0 ? Math.min(ends.length, 3) : free;
      ends[row] = x;
      Object.assign(made.style, { left: `${x}px`, top: `${22 * row}px` });
    }
    if (this.marks) this.marks.style.height = `${Math.max(parseFloat(this.marks.style.height) || 0, 22 * Math.max(ends.length, 1))}px`;
  }

  line(context, { colour, heights, dashed }, columns) {
    context.strokeStyle = ink(colour);
    context.lineWidth = 2;
    context.setLineDash(dashed ? [5, 4] : []);
    context.beginPath();
    let draws = false;
    for (let column = 0; column < columns; column++) {
      const height = heights[column];
      if (Number.isNaN(height)) { draws = false; continue; }
      if (draws) context.lineTo(LEFT + column, this.y(height)); else context.moveTo(LEFT + column, this.y(height));
      context.lineTo(LEFT + column + 1, this.y(height));
      draws = true;
    }
    context.stroke();
    context.setLineDash([]);
  }

  limit(context, { value, text }, width) {
    const y = this.y(value);
    context.strokeStyle = ink("bad");
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
    const left = this.source.dot && this.x(this.source.dot.at) > width / 2;
    told(context, text, left ? LEFT + 4 : width - 2, y - 6, left ? "left" : "right", "bad");
  }

  dot(context, { at, value, text }, width) {
    const x = this.x(at), y = this.y(value);
    context.fillStyle = ink("ink");
    context.beginPath();
    context.arc(x, y, 4.5, 0, 7);
    context.fill();
    const near = this.source.limit ? y - 10 - this.y(this.source.limit.value) : 99;
    const side = x - LEFT < 0.4 * width ? "left" : x > 0.6 * width ? "right" : "center";
    told(context, text, x, near > -4 && near < 18 ? y + 20 : y - 10, side, "ink");
  }

  axes(context, width, bottom) {
    context.fillStyle = ink("faint");
    context.textAlign = "right";
    for (const [value, text] of heightTicks(this.low, this.high, this.source.unit, Math.max(3, Math.floor(bottom / 45)))) {
      const y = this.y(value);
      context.fillText(text, LEFT - 6, Math.min(Math.max(y + 4, 10), bottom));
      context.globalAlpha = 0.15;
      context.fillRect(LEFT, y - 0.5, width - LEFT, 1);
      context.globalAlpha = 1;
    }
    let after = LEFT;
    const ofSteps = stepTicks(this.source, this.view.begin, this.view.end, Math.max(2, width / 100));
    const shown = ofSteps.length ? ofSteps : widthTicks(this.view.begin, this.view.end, this.source.axis, Math.max(2, width / 150));
    for (const [at, text] of shown) {
      const wide = context.measureText(text).width, x = Math.min(Math.max(this.x(at), LEFT + wide / 2), width - wide / 2);
      if (x - wide / 2 < after) continue;
      context.textAlign = "center";
      context.fillText(text, x, bottom + 15);
      after = x + wide / 2 + 8;
    }
    for (const [at, text] of this.source.words ?? []) {
      const fits = context.measureText(text).width < this.x(1) - this.x(0);
      context.textAlign = "center";
      context.fillText(fits ? text : text.split(" ")[0], this.x(at), bottom + 15); // else its number
    }
    context.textAlign = "right";
    const counted = ofSteps.length ? "step" : this.source.axis === "events" ? "event" : "";
    context.fillText(counted, LEFT - 6, bottom + 15);
  }

  overlay() { // moves with the pointer, so that the rest need not be redrawn
    const { over, picture } = this, context = over.getContext("2d"), bottom = picture.pixels - BELOW;
    over.width = picture.canvas.width;
    over.height = picture.canvas.height;
    over.style.height = `${picture.pixels}px`;
    context.scale(devicePixelRatio || 1, devicePixelRatio || 1);
    this.source.over?.(context, this);
    context.fillStyle = ink("ink");
    if (this.pointer !== null) context.fillRect(this.x(this.pointer), 0, 1, bottom);
    if (this.range) {
      context.globalAlpha = 0.15;
      context.fillRect(this.range[0], 0, this.range[1] - this.range[0], bottom);
    }
  }

  tell(at) { // the figures of one moment, in the key and below the picture
    const named = this.source.pixels < 80 ? [] : this.source.named(at); // a small one has no key
    this.key.replaceChildren(...named.map(({ name, colour, text, isLine }) => {
      const swatch = make("span", { class: `swatch c-${colour}${isLine ? " line" : ""}` });
      return make("li", {}, swatch, name, ...(text ? [" ", make("b", {}, text)] : []));
    }));
    this.said.replaceChildren(this.source.about?.(at) ?? "");
  }

  move(at, y) {
    this.pointer = at;
    this.source.point?.(at, y === null ? null : this.value(y));
    this.tell(at);
    this.overlay();
  }

  listen(canvas) {
    let from = null;
    canvas.addEventListener("pointerdown", event => { from = this.picture.place(event)[0]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", event => {
      const [x, y] = this.picture.place(event);
      if (from !== null && event.shiftKey) {
        this.view.pan((from - x) / (this.picture.width - LEFT));
        from = x;
      } else {
        this.range = from !== null && Math.abs(x - from) > 4 ? [from, x] : null;
        this.move(this.at(x), y);
      }
    });
    canvas.addEventListener("pointerup", event => {
      const [x, y] = this.picture.place(event), range = this.range;
      from = this.range = null;
      if (range) this.view.show(...range.map(each => this.at(each)).sort((one, other) => one - other));
      else if (!event.shiftKey) this.source.pick?.(this.at(x), this.value(y));
    });
    canvas.addEventListener("pointerleave", () => this.move(null, null));
    canvas.addEventListener("dblclick", () => this.view.all());
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      this.view.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(this.picture.place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("keydown", event => { if (this.act(event.key, event.shiftKey)) event.preventDefault(); });
  }

  act(key, shift) { // runs the action of a key or a button; false if there is none
    const { view, source } = this, moment = source.moment >= view.begin && source.moment <= view.end ? source.moment : undefined;
    const way = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1 }[key], isUpright = key === "ArrowUp" || key === "ArrowDown";
    if (key === "+" || key === "=") view.zoom(0.5, moment);
    else if (key === "-") view.zoom(2, moment);
    else if (key === "0") view.all();
    else if (key === "f") { this.fits = !this.fits; this.picture.again(); }
    else if (way && isUpright && source.next) source.next(way);
    else if (way && !isUpright && shift && source.step) source.step(way);
    else if (way && !isUpright) view.pan(0.2 * way);
    else return false;
    return true;
  }

  buttons() {
    const keys = [["+", "Zoom in (+)", "+"], ["\u2212", "Zoom out (-)", "-"], ["all", "Show all (0)", "0"], ["fit", "Fit the height to what is shown (f)", "f"]];
    return keys.map(([text, title, key]) => {
      const made = make("button", { type: "button", title }, text);
      made.addEventListener("click", () => this.act(key, false));
      return made;
    });
  }
}

function told(context, text, x, y, side, colour) { // text that is readable on any background
  context.textAlign = side;
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = ink("paper");
  context.strokeText(text, x, Math.max(y, 12));
  context.fillStyle = ink(colour);
  context.fillText(text, x, Math.max(y, 12));
}

// --- the record of a run -------------------------------------------------------------------

class Recorded { // areas and lines over stretches of time
  constructor(raw) {
    Object.assign(this, raw);
    this.tops = this.edges.slice(1).map((_, at) => Math.max(...this.areas.map(area => area.values[at]), ...this.lines.map(line => line.values[at] ?? 0)));
  }

  stretch(at) { // the number of the stretch at a place
    let low = 0, high = this.tops.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.edges[middle + 1] > at) high = middle; else low = middle + 1;
    }
    return low;
  }

  sample(begin, end, columns) {
    const chosen = Array.from({ length: columns }, (_, column) => {
      const at = begin + column / columns * (end - begin);
      let best = this.stretch(at);
      const last = this.stretch(at + (end - begin) / columns);
      for (let next = best + 1; next < last; next++) if (this.tops[next] > this.tops[best]) best = next;
      return at > this.edges[this.edges.length - 1] ? -1 : best;
    });
    const heights = ({ values }) => chosen.map(at => values[at] ?? NaN);
    const areas = this.areas.map(area => ({ ...area, heights: heights(area) }));
    const lines = this.lines.map(line => ({ ...line, heights: heights(line) }));
    const some = chosen.map(at => this.tops[at] ?? 0);
    return { areas, lines, least: Math.min(...(this.areas[0] ?? this.lines[0]).values), most: Math.max(...some) };
  }

  named(at) {
    const stretch = at === null ? null : this.stretch(at), text = TEXTS[this.unit];
    const areas = this.areas.map(({ name, colour, values, note }, which) => {
      const below = which ? this.areas[which - 1].values : null;
      return { name, colour, text: stretch === null ? note : text(values[stretch] - (below ? below[stretch] : 0)) };
    });
    const lines = this.lines.map(({ name, colour, values }) => ({ name, colour, isLine: true, text: stretch === null || values[stretch] == null ? "" : text(values[stretch]) }));
    return [...areas, ...lines, ...(this.others ?? [])];
  }

  about(at) {
    return at === null ? this.hint ?? "" : this.said[this.stretch(at)];
  }
}

// --- the page ------------------------------------------------------------------------------

const views = new Map();
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const source = new Recorded(data.charts[figure.dataset.chart]), low = source.edges[0];
  const high = Math.max(source.edges[source.edges.length - 1], ...source.uprights, ...source.marks.map(each => each.at));
  if (!views.has(source.axis)) views.set(source.axis, new View(low, high, (high - low) / 1000));
  const chart = new Chart(figure, source, views.get(source.axis), source.pixels);
  if (source.pixels > 100) figure.querySelector(".canvas").before(make("div", { class: "tools" }, ...chart.buttons()));
}
pictures.forEach(each => each.now()); // at once: a busy machine may show the page long before its next frame
addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  for (const view of views.values()) view.all();
  document.activeElement?.blur();
});
