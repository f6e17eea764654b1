"use strict";
// Search without a server. Browsers start no Worker from file://, so there the theme's search runs in a hidden frame,
// which is of the same origin as its page: it gets the page's messages, and its own go to the page, not to itself.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      // Messages that come before the script listens wait for it.
      this.ready = new Promise((done) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = done;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
