// Browsers refuse workers to pages that are opened from disk. There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        frame.contentDocument.open();
        inside.importScripts = (...addresses) => Promise.all(addresses.map((one) => new Promise((loaded) => {
          const script = frame.contentDocument.createElement("script");
          script.src = one;
          script.onload = loaded;
          frame.contentDocument.body.appendChild(script);
        })));
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.loaded = resolve;
        frame.contentDocument.write(`<body><script src="${address}" onload="loaded()"><\/script></body>`);
        frame.contentDocument.close();
      });
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
