"use strict";
// Draw memory snapshots with the tools of `page.js`: blocks over time, their stacks, and their addresses.
const ROW = 18, MOST_ROWS = 40, MAP_ROWS = 24, MAP_ROW = 14; // pixels of a row, except where the name says how many

class Snapshot {
  constructor(raw) {
    Object.assign(this, raw);
    const count = this.count = raw.birth.length;
    let last = -1;
    this.birth = Int32Array.from(raw.birth, step => last += step);
    this.death = Float64Array.from(raw.lasted, (events, at) => events < 0 ? Infinity : this.birth[at] + events);
    this.levels = raw.categories.map(() => new Float64Array(raw.events + 1)); // after each event, from -1 on
    for (let id = 0; id < count; id++) {
      const level = this.levels[raw.category[id]];
      level[this.birth[id] + 1] += raw.bytes[id];
      if (this.death[id] < raw.events) level[this.death[id] + 1] -= raw.bytes[id];
    }
    this.total = new Float64Array(raw.events + 1);
    for (const level of this.levels) for (let at = 0; at <= raw.events; at++) {
      if (at) level[at] += level[at - 1];
      this.total[at] += level[at];
    }
    this.reserved = new Float64Array(raw.events + 1);
    let held = raw.ranges.reduce((sum, [low, high]) => sum + high - low, 0), next = 0;
    for (let at = 0; at <= raw.events; at++) {
      for (; next < raw.segments.length && raw.segments[next][0] < at; next++) held += raw.segments[next][2];
      this.reserved[at] = held;
    }
    this.children = raw.parent.map(() => []);
    this.roots = [];
    raw.parent.forEach((parent, node) => (parent < 0 ? this.roots : this.children[parent]).push(node));
  }

  // The live blocks after an event, by category and in the order of birth: the stacking order of the picture.
  alive(moment) {
    const found = this.categories.map(() => []);
    for (let id = 0; id < this.count && this.birth[id] <= moment; id++) if (this.death[id] > moment) found[this.category[id]].push(id);
    return found;
  }

  sweep(moments, visit) { // visits each block at each moment: column, block, and its two heights in bytes
    const lists = this.alive(moments[0]);
    let next = this.birth.findIndex(birth => birth > moments[0]);
    if (next < 0) next = this.count;
    moments.forEach((moment, column) => {
      for (; next < this.count && this.birth[next] <= moment; next++) lists[this.category[next]].push(next);
      let level = 0;
      for (const list of lists) {
        let kept = 0;
        for (const id of list) {
          if (this.death[id] <= moment) continue;
          list[kept++] = id;
          visit(column, id, level, level + this.bytes[id]);
          level += this.bytes[id];
        }
        list.length = kept;
      }
    });
  }

  block(moment, bytes) { // the block at a height
    let level = 0;
    for (const id of this.alive(moment).flat()) if ((level += this.bytes[id]) > bytes) return bytes < 0 ? null : id;
    return null;
  }

  ranges_at(moment) { // the reserved segments after an event: first and last address of each
    let ranges = this.ranges.map(range => [...range]);
    for (const [at, address, bytes] of this.segments) {
      if (at > moment) break;
      const end = address + Math.abs(bytes);
      ranges = ranges.flatMap(([low, high]) => high <= address || low >= end ? [[low, high]] : [[low, address], [end, high]].filter(([from, to]) => from < to));
      if (bytes > 0) ranges.push([address, end]);
    }
    ranges.sort((one, other) => one[0] - other[0]);
    return this.joins ? ranges.reduce((found, [low, high]) => {
      const last = found[found.length - 1];
      if (last && last[1] === low) last[1] = high; else found.push([low, high]);
      return found;
    }, []) : ranges;
  }

  words(node) {
    const [file, line, name] = this.frames[this.frame[node]];
    return line ? `${this.files[file]}:${line} ${this.names[name]}` : this.names[name];
  }

  short(node) { // the most specific part first, since labels are cut off
    const [file, line, name] = this.frames[this.frame[node]], place = line ? ` ${this.files[file].split("/").pop()}:${line}` : "";
    return this.names[name] + place;
  }

  stack(node) { // the innermost frame first
    const found = [];
    for (; node >= 0; node = this.parent[node]) found.push(node);
    return found;
  }

  isOwn(node) { return this.frames[this.frame[node]][3]; }
  line(node) { return this.words(this.stack(node).find(each => this.isOwn(each)) ?? node); }
}

// The pictures of one snapshot: they share the chosen moment, the chosen block, and the search.
class Explorer {
  constructor(section, snapshot, top) {
    const shown = this.snapshot = snapshot;
    Object.assign(this, { moment: shown.moment, hover: null, picked: null, focus: null, wanted: "", marked: null });
    this.unit = "bytes";
    this.axis = "events";
    this.title = shown.title;
    this.top = 1.16 * top;
    this.spans = shown.passes;
    this.others = ["forward", "backward", "optimizer"].map((name, at) => ({ name, colour: ["first", "second", "third"][at] })).filter(({ colour }) => shown.passes.some(each => each.colour === colour));
    this.uprights = shown.oom === null ? [] : [shown.oom + 1];
    this.limit = shown.capacity ? { value: shown.capacity, text: `it could hold ${size(shown.capacity)}` } : null;
    this.view = new View(0, shown.events || 1, Math.min(8, shown.events || 1));
    const figure = section.querySelector("figure");
    if (shown.events) {
      this.chart = new Chart(figure, this, this.view, 280);
      figure.querySelector(".canvas").before(make("div", { class: "tools" }, ...this.chart.buttons()));
    }
    this.about_block = make("div", { class: "block", "aria-live": "polite" });
    figure.append(this.about_block);
    this.flames = make("figure", {}, this.flame_title = make("figcaption"), this.flame_box = make("div", { class: "canvas" }), this.flame_said = make("p", { class: "said" }));
    this.map = make("figure", {}, this.map_title = make("figcaption"), this.map_box = make("div", { class: "canvas" }), this.map_said = make("p", { class: "said" }));
    section.append(this.flames, this.map);
    this.icicle = new Picture(this.flame_box, "Stacks of what is in use", ROW, (...given) => this.draw_icicle(...given));
    this.places = new Picture(this.map_box, "Where blocks lie in what is reserved", MAP_ROW, (...given) => this.draw_map(...given));
    this.hear(this.icicle, (node, pinned) => this.frame_under(node, pinned));
    this.hear(this.places, (piece, pinned) => this.piece_under(piece, pinned));
    this.go(this.moment);
  }

  hear(picture, does) {
    const under = event => {
      const [x, y] = picture.place(event);
      return picture.boxes?.find(box => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height) ?? null;
    };
    picture.canvas.addEventListener("pointermove", event => does(under(event), false));
    picture.canvas.addEventListener("pointerleave", () => does(null, false));
    picture.canvas.addEventListener("click", event => does(under(event), true));
  }

  go(moment) { // choose a moment
    this.moment = Math.min(Math.max(Math.round(moment), -1), this.snapshot.events - 1);
    this.when = this.moment === this.snapshot.moment ? this.snapshot.when : `after event ${number(this.moment)}`;
    this.blocks = this.snapshot.alive(this.moment).flat();
    this.again();
  }

  again() {
    this.chart?.picture.again();
    this.chart?.tell(null);
    this.icicle.again();
    this.places.again();
    this.show_block();
  }

  // As a source of a chart.
  sample(begin, end, columns) {
    const { snapshot } = this, moments = [];
    for (let column = 0; column < columns; column++) {
      const first = Math.floor(begin + column / columns * (end - begin)), last = Math.floor(begin + (column + 1) / columns * (end - begin));
      let best = first;
      for (let at = first + 1; at < last; at++) if (snapshot.total[at + 1] > snapshot.total[best + 1]) best = at;
      moments.push(Math.min(best, snapshot.events - 1));
    }
    let below = new Float64Array(columns);
    const areas = snapshot.levels.map((level, at) => {
      below = below.map((height, column) => height + level[moments[column] + 1]);
      return { colour: snapshot.colours[at], heights: below };
    });
    const reserved = moments.map(at => snapshot.reserved[at + 1]);
    const totals = moments.map(at => snapshot.total[at + 1]);
    return { moments, areas, lines: [{ colour: "ink", heights: reserved }], least: Math.min(...totals), most: Math.max(...reserved) };
  }

  named(at) {
    const { snapshot } = this, moment = (at === null ? this.moment : Math.min(Math.floor(at), snapshot.events - 1)) + 1;
    const found = snapshot.levels.map((level, which) => ({ name: snapshot.categories[which], colour: snapshot.colours[which], bytes: level[moment] }));
    const held = found.filter(({ bytes }, which) => bytes || snapshot.levels[which].some(Boolean));
    return [...held.map(each => ({ ...each, text: size(each.bytes) })), { name: "reserved", colour: "reserved", isLine: true, text: size(snapshot.reserved[moment]) }, ...this.others];
  }

  about(at) {
    if (at === null) return "Point at a block, or click it to keep its stack. Drag to zoom; keys: + - 0, arrows, f, / to search.";
    const words = this.hover === null ? "" : `: ${this.block_words(this.hover)}`;
    return `Event ${number(Math.floor(at))}${words}`;
  }

  point(at, bytes) { this.hover = at === null || bytes === null ? null : this.snapshot.block(Math.floor(at), bytes); }

  pick(at, bytes) {
    this.picked = this.snapshot.block(Math.floor(at), bytes);
    this.go(Math.floor(at));
  }

  step(way) { this.go(this.moment + way); }

  next(way) { // the keyboard's way to a block: the one above or below at the chosen moment
    const at = this.blocks.indexOf(this.picked) + way;
    if (this.blocks.length) this.picked = this.blocks[Math.min(Math.max(at, 0), this.blocks.length - 1)];
    this.again();
  }

  dims() { return this.marked !== null; }

  details(context, chart, sample) { // the borders of blocks that are high enough, and the search results
    const least = 4 / (chart.picture.pixels - BELOW) * (chart.high - chart.low), rule = ink("paper");
    if (!this.marked && chart.view.width > 200_000) return;
    this.snapshot.sweep(sample.moments, (column, id, low, high) => {
      if (this.marked && this.is_marked(id)) {
        context.fillStyle = ink(this.snapshot.colours[this.snapshot.category[id]]);
        context.fillRect(LEFT + column, chart.y(high), 1, chart.y(low) - chart.y(high));
      } else if (high - low > least) {
        context.fillStyle = rule;
        context.fillRect(LEFT + column, chart.y(high), 1, 0.6);
      }
    });
  }

  over(context, chart) {
    const wanted = [this.hover, this.picked].filter(id => id !== null), bottom = chart.picture.pixels - BELOW;
    if (wanted.length) this.snapshot.sweep(chart.sampled.moments, (column, id, low, high) => {
      if (!wanted.includes(id)) return;
      context.fillStyle = ink("ink");
      context.globalAlpha = id === this.picked ? 0.75 : 0.4;
      const top = Math.max(chart.y(high), 0), until = Math.min(chart.y(low), bottom);
      if (until > top) context.fillRect(LEFT + column, top, 1, Math.max(1, until - top));
    });
    context.globalAlpha = 1;
    const x = chart.x(this.moment + 0.5);
    context.strokeStyle = ink("accent");
    context.lineWidth = 1.5;
    if (x >= LEFT) context.strokeRect(x, 0, 0, bottom);
  }

  // The block, its life and its stack.
  block_words(id) {
    const { snapshot } = this;
    return `${size(snapshot.bytes[id])} ${snapshot.categories[snapshot.category[id]]}, ${snapshot.line(snapshot.node[id])}`;
  }

  show_block() {
    const { snapshot, picked: id } = this;
    if (id === null) return this.about_block.replaceChildren();
    const died = snapshot.death[id], until = died === Infinity ? "alive at the end" : `until event ${number(died)} (${number(died - snapshot.birth[id])} events)`;
    const since = snapshot.birth[id] < 0 ? "there before the recording" : `from event ${number(snapshot.birth[id])}`;
    const asked = snapshot.asked[id] ? `; ${number(snapshot.asked[id])} bytes were asked for` : "";
    const facts = `${number(snapshot.bytes[id])} bytes at 0x${(snapshot.base + snapshot.address[id]).toString(16)}, ${since}, ${until}${asked}`;
    const stack = snapshot.stack(snapshot.node[id]).map(node => make("li", snapshot.isOwn(node) ? { class: "own" } : {}, snapshot.words(node)));
    this.about_block.replaceChildren(make("h3", {}, this.block_words(id)), make("p", {}, facts), make("ol", { class: "stack" }, ...stack));
  }

  // Stacks of the memory in use at the moment: the outermost frame above, each as wide as its memory.
  draw_icicle(context, width) {
    const { snapshot } = this, count = snapshot.parent.length, weights = new Float64Array(count), kinds = snapshot.categories.map(() => new Float64Array(count));
    for (const id of this.blocks) kinds[snapshot.category[id]][snapshot.node[id]] += snapshot.bytes[id];
    for (let node = count - 1; node >= 0; node--) for (const kind of kinds) {
      weights[node] += kind[node];
      if (snapshot.parent[node] >= 0) kind[snapshot.parent[node]] += kind[node];
    }
    const main = node => kinds.reduce((best, kind, at) => kind[node] > kinds[best][node] ? at : best, 0);
    const heaviest = nodes => nodes.filter(node => weights[node]).sort((one, other) => weights[other] - weights[one]);
    const boxes = this.icicle.boxes = [], total = snapshot.total[this.moment + 1] || 1;
    let roots = this.focus === null ? heaviest(snapshot.roots) : [this.focus], left_out = 0;
    while (this.focus === null && roots.length === 1 && heaviest(snapshot.children[roots[0]]).length === 1) {
      roots = heaviest(snapshot.children[roots[0]]); // frames that hold everything are not informative
      left_out++;
    }
    const whole = roots.reduce((sum, node) => sum + weights[node], 0) || 1;
    const lay = (nodes, x, row) => {
      if (row >= MOST_ROWS) return;
      for (const node of heaviest(nodes)) {
        const wide = weights[node] / whole * width;
        if (wide < 0.7) break;
        boxes.push({ x, y: row * ROW, width: wide, height: ROW, node, bytes: weights[node], kind: main(node) });
        lay(snapshot.children[node], x, row + 1);
        x += wide;
      }
    };
    lay(roots, 0, 0);
    const pixels = ROW * (1 + boxes.reduce((most, box) => Math.max(most, box.y / ROW), 0));
    if (pixels !== this.icicle.pixels) {
      this.icicle.pixels = pixels;
      return this.icicle.now();
    }
    for (const box of boxes) {
      context.globalAlpha = this.marked && !this.marked[box.node] ? 0.2 : 0.75;
      context.fillStyle = ink(snapshot.colours[box.kind]);
      context.fillRect(box.x, box.y, Math.max(box.width - 1, 0.7), ROW - 1);
      context.globalAlpha = 1;
      if (box.width > 36) label(context, snapshot.short(box.node), box.x + 3, box.y + 13, box.width - 6);
    }
    const inside = this.focus === null ? (left_out ? `, within ${left_out} frames that hold all of it` : "") : `, of ${size(whole)} within ${snapshot.words(this.focus)}`;
    this.flame_title.textContent = `Which stacks hold the ${size(total)} in use ${this.when}${inside}`;
    this.flame_said.textContent = this.focus === null ? "Point at a frame; click it to look into it." : "Click the frame at the top to see all again.";
  }

  frame_under(box, pinned) {
    if (pinned) {
      this.focus = box === null || box.node === this.focus ? null : box.node;
      this.search(this.wanted);
    } else if (box) {
      const share = box.bytes / (this.snapshot.total[this.moment + 1] || 1);
      this.flame_said.textContent = `${size(box.bytes)}, ${(100 * share).toFixed(0)}%: ${this.snapshot.words(box.node)}`;
    }
  }

  // All reserved memory, from low addresses to high ones, cut into rows.
  draw_map(context, width, pixels) {
    const { snapshot } = this, ranges = snapshot.ranges_at(this.moment), boxes = this.places.boxes = [];
    const reserved = ranges.reduce((sum, [low, high]) => sum + high - low, 0);
    const rows = Math.max(1, Math.min(MAP_ROWS, Math.floor(reserved / 2 ** 21)));
    if (pixels !== rows * MAP_ROW) {
      this.places.pixels = rows * MAP_ROW;
      return this.places.now();
    }
    const alive = [...this.blocks].sort((one, other) => snapshot.address[one] - snapshot.address[other]);
    const per = Math.ceil(reserved / rows) || 1, gaps = []; // whole bytes
    let next = 0, done = 0;
    const put = (id, address, bytes, segment) => {
      const piece = { id, address, bytes, segment };
      if (id === null) gaps.push(bytes);
      for (let from = done, rest = bytes; rest > 0;) {
        const row = Math.floor(from / per), part = Math.min(rest, (row + 1) * per - from);
        boxes.push({ piece, x: (from - row * per) / per * width, y: row * MAP_ROW, width: part / per * width, height: MAP_ROW });
        from += part;
        rest -= part;
      }
      done += bytes;
    };
    const cuts = [];
    for (const [low, high] of ranges) {
      let at = low;
      for (; next < alive.length && snapshot.address[alive[next]] < high; next++) {
        const id = alive[next], address = snapshot.address[id];
        if (address < at) continue; // an edited file may hold a block twice
        if (address > at) put(null, at, address - at, high - low);
        at = Math.min(address + snapshot.bytes[id], high);
        put(id, address, at - address, high - low);
      }
      if (at < high) put(null, at, high - at, high - low);
      cuts.push(done);
    }
    context.fillStyle = ink("free");
    context.fillRect(0, 0, width, pixels);
    for (const box of boxes) {
      if (box.piece.id === null) continue;
      context.globalAlpha = this.marked && !this.is_marked(box.piece.id) ? 0.25 : 1;
      context.fillStyle = box.piece.id === this.picked ? ink("ink") : ink(snapshot.colours[snapshot.category[box.piece.id]]);
      context.fillRect(box.x, box.y + 1, Math.max(box.width - (box.width > 3 ? 0.5 : 0), 0.5), MAP_ROW - 2);
    }
    context.globalAlpha = 1;
    context.fillStyle = ink("ink");
    for (const cut of cuts.slice(0, -1)) {
      const row = Math.min(Math.floor(cut / per), rows - 1);
      context.fillRect((cut - row * per) / per * width - 0.75, row * MAP_ROW, 1.5, MAP_ROW);
    }
    const free = gaps.reduce((sum, bytes) => sum + bytes, 0), most = gaps.reduce((one, other) => Math.max(one, other), 0);
    const asked = snapshot.asked_bytes !== null && this.moment === snapshot.moment ? `; ${size(snapshot.asked_bytes)} were requested` : "";
    this.map_title.textContent = `Where it lay ${this.when}: ${size(free)} free in ${number(gaps.length)} ${gaps.length === 1 ? "gap" : "gaps"}, the largest ${size(most)}${asked}`;
    this.map_said.textContent = `${number(ranges.length)} segment(s) from low addresses to high ones, a row is ${size(per)}. Empty parts are free; a tensor never reaches across the end of a segment.`;
  }

  piece_under(box, pinned) {
    if (box && pinned) {
      this.picked = box.piece.id;
      this.again();
    } else if (box) {
      const { id, address, bytes, segment } = box.piece, where = `at 0x${(this.snapshot.base + address).toString(16)}, in a segment of ${size(segment)}`;
      this.map_said.textContent = id === null ? `A gap of ${size(bytes)} ${where}` : `${this.block_words(id)}, ${where}`;
    }
  }

  is_marked(id) { return this.marked[this.snapshot.node[id]] || this.kinds.has(this.snapshot.category[id]); }

  search(wanted) { // marks the blocks whose stacks have a frame with these words, or of a category, or within a chosen frame
    const { snapshot } = this, words = wanted.trim().toLowerCase();
    this.wanted = wanted;
    this.marked = words || this.focus !== null ? new Uint8Array(snapshot.parent.length) : null;
    this.kinds = new Set(words ? snapshot.categories.keys() : []);
    for (const kind of this.kinds) if (!snapshot.categories[kind].toLowerCase().includes(words)) this.kinds.delete(kind);
    if (this.marked) snapshot.parent.forEach((parent, node) => {
      const fits = words ? snapshot.words(node).toLowerCase().includes(words) : node === this.focus;
      this.marked[node] = fits || (parent >= 0 && this.marked[parent]) ? 1 : 0;
    });
    this.again();
    const found = this.marked ? this.blocks.filter(id => this.is_marked(id)) : [];
    let all = 0;
    if (this.marked) for (let id = 0; id < snapshot.count; id++) if (this.is_marked(id)) all++;
    return `${number(found.length)} of ${number(all)} blocks that match, ${size(found.reduce((sum, id) => sum + snapshot.bytes[id], 0))}, in use ${this.when}`;
  }
}

function label(context, text, x, y, width) {
  context.fillStyle = ink("ink");
  context.textAlign = "left";
  const fits = Math.floor(width / 6.2);
  context.save();
  context.beginPath();
  context.rect(x, y - 13, width, ROW);
  context.clip();
  context.fillText(text.length > fits ? text.slice(0, fits + 4) : text, x, y);
  context.restore();
}

// --- the page ------------------------------------------------------------------------------

const snapshots = data.snapshots.map(raw => new Snapshot(raw));
const most = Math.max(...snapshots.map(each => Math.max(each.capacity && each.capacity < 2.5 * each.peak ? each.capacity : 0, each.peak)));
const shown = [...document.querySelectorAll("section[data-snapshot]")].map((section, at) => new Explorer(section, snapshots[at], most));

const field = document.getElementById("search"), told_found = document.getElementById("found");
function search(wanted) {
  const found = shown.map(each => each.search(wanted));
  told_found.textContent = wanted.trim() ? found.join(" | ") : "";
}
field.addEventListener("input", () => search(field.value));
addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== field) {
    event.preventDefault();
    field.focus();
  } else if (event.key === "Escape") {
    field.value = "";
    for (const each of shown) {
      Object.assign(each, { picked: null, focus: null });
      each.view.all();
    }
    search("");
  }
});
pictures.forEach(each => each.now());
