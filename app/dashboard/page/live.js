// Live: the server's frames as they come, as long as this page is open and looked at.
import { h } from "./dom.js";
import { Models } from "./models.js";
import { ask, events, Refused } from "./server.js";
import { View } from "./view.js";

export class Live {
  constructor(root) {
    this.notice = h("p.notice", { role: "status" });
    this.body = h("div.view", { tabIndex: -1, hidden: true });
    root.append(this.notice);
    this.models = new Models(root);
    root.append(this.body);
    this.view = new View(this.body);
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.leave();
      else if (!root.hidden) this.enter();
    });
  }

  enter() {
    this.leave();
    this.controller = new AbortController();
    this.follow(this.controller.signal);
    this.models.follow(this.controller.signal);
  }

  leave() { this.controller?.abort(); }

  async follow(signal) {
    while (!signal.aborted) {
      try {
        const answer = await ask("dashboard/frames", { kind: "admin", signal });
        for await (const [name, data] of events(answer)) {
          if (name !== "frame") break;
          this.tell("");
          this.view.push(JSON.parse(data));
        }
        this.tell("The server has ended the feed; looking for it again.");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && error.status === 401) {
          this.view.clear();
          this.tell(error.message, true);
          this.body.hidden = true;
          return;
        }
        this.tell(error instanceof Refused ? error.message : "The server does not answer; trying again.");
      }
      await new Promise((done) => setTimeout(done, 1000));
    }
  }

  tell(words, wantsKey = false) {
    this.notice.replaceChildren(words, ...(wantsKey ? [" ", h("button", { onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key")] : []));
    this.notice.hidden = !words;
    if (!words) this.body.hidden = false;
  }
}
