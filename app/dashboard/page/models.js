// The models of a server that has several: state, memory, and buttons that load and unload.
import { h } from "./dom.js";
import { ask } from "./server.js";

const EVERY = 2000; // milliseconds between two looks
const MIB = 2 ** 20;
const NEXT = { unloaded: "load", failed: "load", loaded: "unload" };

export class Models {
  constructor(root) {
    this.rows = h("tbody");
    this.words = h("p.notice", { role: "status", hidden: true });
    const heads = ["Model", "State", "Memory", ""].map((name) => h("th", {}, name));
    this.panel = h("div.panel.models", { hidden: true }, h("h2", {}, "Models"), h("table", {}, h("thead", {}, h("tr", {}, ...heads)), this.rows), this.words);
    root.append(this.panel);
  }

  async follow(signal) {
    while (!signal.aborted && await this.look(signal)) {
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  // Returns false for a key that the server does not take: asking again would only fill its log.
  async look(signal) {
    try {
      const { data } = await (await ask("v1/models", { signal })).json();
      if (!signal?.aborted) this.draw(data);
    } catch (error) { // the page says what is wrong with the server
      return error.status !== 401;
    }
    return true;
  }

  draw(cards) {
    this.panel.hidden = cards.length < 2;
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.dataset.model : null;
    this.rows.replaceChildren(...cards.map(({ id, status, memory }) => {
      const what = NEXT[status];
      const button = what && h("button", { "data-model": id, ariaLabel: `${what} ${id}`, onclick: () => this.change(what, id) }, what === "load" ? "Load" : "Unload");
      return h("tr", {}, h("td", {}, id), h("td", {}, status), h("td", {}, memory ? `${Math.round(memory / MIB)} MiB` : "–"), h("td", {}, ...(button ? [button] : [])));
    }));
    if (focused !== null) this.rows.querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
  }

  async change(what, model) {
    this.say("");
    try {
      const asked = ask(`v1/models/${what}`, { kind: "admin", body: { model } });
      await Promise.race([asked, new Promise((done) => setTimeout(done, 100))]); // a load takes a while
      await this.look();
      await asked;
    } catch (error) {
      this.say(error.message);
    }
    await this.look();
  }

  say(words) {
    this.words.textContent = words;
    this.words.hidden = !words;
  }
}
