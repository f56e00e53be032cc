// The search runs in a worker, which browsers refuse to pages that are opened as files.
// There this runs the worker's script in a hidden frame instead, with the same messages.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow, page = frame.contentDocument;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => load(page, each)), Promise.resolve());
      this.loaded = load(page, url);
      this.inside = inside;
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };

function load(page, url) {
  return new Promise((done, failed) => {
    const script = page.createElement("script");
    Object.assign(script, {src: url, onload: done, onerror: failed});
    page.body.append(script);
  });
}
