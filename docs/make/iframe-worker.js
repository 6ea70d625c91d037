// Search in a site that is read from a folder: browsers start no worker for a page of file://. This one
// runs the worker's script in a hidden frame instead, and hands messages over.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        frame.contentDocument.head.append(script);
      });
    }
    postMessage(data) {
      const message = new this.inside.MessageEvent("message", { data });
      this.ready.then(() => this.inside.dispatchEvent(message));
    }
  };
}
