// Live: is the service healthy, what does it serve, and the server's frames as they come while this page is looked at.
import { span } from "./axes.js";
import { Charts } from "./charts.js";
import { h, number } from "./dom.js";
import { Models } from "./models.js";
import { ask, events, Refused } from "./server.js";
import { View } from "./view.js";

const LONG_WAIT = 5; // seconds for the oldest request, from which on the server is overloaded
const MINUTE = 60;

export class Live {
  constructor(root) {
    this.notice = h("p.notice", { role: "status" });
    this.health = h("p.health", { hidden: true }, h("i"), h("span"));
    this.served = h("dl.served", { hidden: true });
    this.body = h("div.view", { tabIndex: -1, hidden: true });
    root.append(this.notice, h("div.state", {}, this.health, this.served));
    this.models = new Models(root);
    this.charts = new Charts(root, (answer) => this.take(answer));
    root.append(this.body);
    this.view = new View(this.body, (id) => this.abort(id));
    this.frames = new Map(); // by engine: the latest
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
    this.charts.follow(this.controller.signal);
  }

  leave() { this.controller?.abort(); }

  async follow(signal) {
    while (!signal.aborted) {
      try {
        const answer = await ask("dashboard/frames", { kind: "admin", signal });
        for await (const [name, data] of events(answer)) {
          if (name !== "frame") break;
          this.tell("");
          const frame = JSON.parse(data);
          this.view.push(frame);
          this.frames.set(frame.engine, frame);
          this.drawHealth();
        }
        this.tell("The server has ended the feed; looking for it again.");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && error.status === 401) {
          this.view.clear();
          this.tell(error.message, true);
          this.show(false);
          return;
        }
        this.tell(error instanceof Refused ? error.message : "The server does not answer; trying again.");
      }
      this.health.hidden = true;
      this.frames.clear();
      await new Promise((done) => setTimeout(done, 1000));
    }
  }

  // What is served, and how many were refused, as the server's history has it.
  take(answer) {
    this.answer = answer;
    const facts = [["Headrace", answer.version], ["Up", span(answer.seconds)]];
    for (const model of answer.models) {
      facts.unshift([answer.models.length > 1 ? "Loaded" : "Model", model.name]);
      if (answer.models.length > 1 || !model.context) continue;
      facts.push(["Device", model.device], ["Threads", model.threads], ["Context", `${model.context.toLocaleString("en")} tokens`]);
      facts.push(["Slots", model.engines > 1 ? `${model.slots} in ${model.engines} engines` : model.slots], ["KV cache", `${model.kv_tokens.toLocaleString("en")} tokens`]);
    }
    this.served.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
    this.served.hidden = false;
  }

  drawHealth() {
    const frames = [...this.frames.values()];
    const sum = (value) => frames.reduce((total, frame) => total + value(frame), 0);
    const [running, waiting, slots] = [sum((frame) => frame.num_running), sum((frame) => frame.num_waiting), sum((frame) => frame.limits.max_num_seqs)];
    const oldest = Math.max(...frames.map((frame) => frame.oldest_wait ?? 0));
    const refused = new Map();
    for (const { age, refused: reasons } of Object.values(this.answer?.series ?? {})) {
      age.forEach((each, index) => {
        if (each > MINUTE) return;
        for (const [reason, count] of Object.entries(reasons[index])) refused.set(reason, (refused.get(reason) ?? 0) + count);
      });
    }
    const many = (count) => (count ? number(count) : "none");
    const slotWords = running ? `${number(running)} of ${number(slots)} slots run` : "Nothing runs";
    const waitWords = waiting ? `${number(waiting)} ${waiting === 1 ? "waits" : "wait"}${oldest ? `, oldest waits ${span(oldest)}` : ""}` : "nothing waits";
    const refusals = [...refused].map(([reason, count]) => `${many(count)} (${reason.replaceAll("_", " ")})`).join(", ");
    const state = refused.size ? "bad" : oldest > LONG_WAIT ? "warn" : "good";
    const name = refused.size ? "Refusing" : oldest > LONG_WAIT ? "Overloaded" : waiting ? "Busy" : running ? "Healthy" : "Idle";
    this.health.firstChild.className = state;
    this.health.lastChild.textContent = `${name}: ${slotWords.replace("Nothing", "nothing")}, ${waitWords}.${refusals ? ` Refused in the last minute: ${refusals}.` : ""}`;
    this.health.hidden = false;
  }

  async abort(id) {
    if (this.answer && !this.answer.administered) throw new Refused(404, "This server has no admin_keys (HEADRACE_ADMIN_KEYS), so requests cannot be aborted here.");
    await ask("abort_requests", { kind: "admin", body: { request_ids: [id] } });
  }

  tell(words, wantsKey = false) {
    this.notice.replaceChildren(words, ...(wantsKey ? [" ", h("button", { onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key")] : []));
    this.notice.hidden = !words;
    if (!words) this.show(true);
  }

  show(isShown) {
    this.body.hidden = !isShown;
    if (!isShown) for (const part of [this.health, this.served, this.charts.panel]) part.hidden = true;
  }
}
