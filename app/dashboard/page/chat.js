// Chat: conversations with the model, kept in this browser only.
import { h, number, seconds } from "./dom.js";
import { markdown } from "./markdown.js";
import { ask, events, Refused } from "./server.js";
import { forget, fresh, load, onOtherTab, saveSettings, saveTalk } from "./talks.js";

const SETTINGS = [
  ["temperature", { min: 0, max: 2, step: 0.05 }], ["top_p", { min: 0, max: 1, step: 0.01 }], ["top_k", { min: 0, step: 1 }], ["min_p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", { min: 0.01, max: 10, step: 0.01 }], ["frequency_penalty", { min: -2, max: 2, step: 0.1 }], ["max_tokens", { min: 1, step: 1 }], ["seed", { step: 1 }],
];

export class Chat {
  constructor(root) {
    this.store = load();
    this.list = h("ul.conversations");
    this.log = h("div.log", { role: "log", ariaLive: "off", tabIndex: -1 });
    this.input = h("textarea", { rows: 3, placeholder: "Ask something (Enter sends, Shift+Enter is a new line, Esc stops)", ariaLabel: "Message" });
    this.button = h("button.primary", { type: "submit" }, "Send");
    this.system = h("textarea", { rows: 3, ariaLabel: "System prompt", oninput: () => { this.talk.system = this.system.value; saveTalk(this.talk); } });
    this.model = h("select", { ariaLabel: "Model", onchange: () => { this.store.model = this.model.value; this.showDefaults(); saveSettings(this.store); } });
    this.cards = {};
    this.fields = Object.fromEntries(SETTINGS.map(([name, range]) => [name, h("input", { type: "number", placeholder: "model’s", ...range, value: this.store.settings[name] ?? "", oninput: () => this.set(name) })]));
    this.side = h("aside", {},
      h("button", { onclick: () => this.begin() }, "New conversation"), this.list,
      h("details", {}, h("summary", {}, "Settings"),
        h("label", {}, "Model ", this.model), h("label", {}, "System prompt ", this.system),
        ...SETTINGS.map(([name]) => h("label.setting", {}, name.replaceAll("_", " "), this.fields[name]))));
    const form = h("form.compose", { onsubmit: (event) => { event.preventDefault(); this.controller ? this.stop() : this.send(); } }, this.input, this.button);
    root.append(this.side, h("div.talk", {}, this.log, form));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.controller) this.send(); }
    });
    root.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    if (!this.store.talks.length) this.store.talks.push(fresh());
    this.open(this.store.talks[0]);
    onOtherTab((id, talk) => this.hear(id, talk));
  }

  // Another tab has changed a conversation. What is being answered here is this tab's.
  hear(id, talk) {
    const known = this.store.talks.find((each) => each.id === id);
    if (known && known === this.answered) return;
    if (talk && known) Object.assign(known, talk);
    else if (talk) this.store.talks.unshift(talk);
    else this.drop(known);
    if (known && known === this.talk) this.open(talk ? known : this.store.talks[0]);
    else this.drawList();
  }

  drop(talk) {
    this.store.talks = this.store.talks.filter((each) => each !== talk);
    if (!this.store.talks.length) this.store.talks.push(fresh());
  }

  enter() {
    this.input.focus();
    this.findModels();
  }

  async findModels() {
    try {
      const { data } = await (await ask("v1/models")).json();
      this.cards = Object.fromEntries(data.map((card) => [card.id, card]));
      this.model.replaceChildren(...data.map(({ id, status }) => h("option", { value: id, selected: id === this.store.model }, data.length > 1 && status !== "loaded" ? `${id} (${status})` : id)));
      this.showDefaults();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) this.say(error.message, true);
      else setTimeout(() => this.findModels(), 2000); // it may be loading
    }
  }

  showDefaults() {
    const { default_parameters: defaults, chat_parameters: ours } = this.cards[this.model.value] ?? {};
    for (const [name] of SETTINGS) this.fields[name].placeholder = ours?.[name] ?? defaults?.[name] ?? "model’s";
  }

  begin() {
    this.stop();
    if (this.talk.messages.length) {
      this.store.talks.unshift(fresh());
      saveTalk(this.store.talks[0]);
    }
    this.open(this.store.talks[0]);
    this.input.focus();
  }

  open(talk) {
    this.stop();
    this.talk = talk;
    this.system.value = talk.system;
    this.log.replaceChildren(...talk.messages.map((message) => bubble(message).element));
    if (!talk.messages.length) this.log.append(h("p.faint.hello", {}, "What you write goes to this server and nowhere else. Conversations are kept in this browser."));
    this.drawList();
    this.log.scrollTop = this.log.scrollHeight;
  }

  drawList() {
    this.list.replaceChildren(...this.store.talks.map((talk) => h("li", {},
      h("button.name", { ariaCurrent: talk === this.talk, onclick: () => this.open(talk) }, talk.messages[0]?.content.slice(0, 60) || "New conversation"),
      h("button.remove", { ariaLabel: "Delete this conversation", title: "Delete", onclick: () => this.remove(talk) }, "×"))));
  }

  remove(talk) {
    forget(talk);
    this.drop(talk);
    this.open(talk === this.talk ? this.store.talks[0] : this.talk);
  }

  set(name) {
    const { value, valueAsNumber } = this.fields[name];
    if (value === "" || Number.isNaN(valueAsNumber)) delete this.store.settings[name];
    else this.store.settings[name] = valueAsNumber;
    saveSettings(this.store);
  }

  stop() { this.controller?.abort(); }

  async send() {
    const content = this.input.value.trim();
    if (!content) return;
    const { talk } = this;
    this.input.value = "";
    this.log.querySelector(".hello")?.remove();
    this.log.querySelector(".notice")?.remove();
    const question = { role: "user", content };
    const answer = { role: "assistant", content: "", reasoning: "", facts: [] };
    talk.messages.push(question, answer);
    const shown = bubble(answer);
    this.log.append(bubble(question).element, shown.element);
    this.log.scrollTop = this.log.scrollHeight;
    this.drawList();
    this.answered = talk;
    saveTalk(talk);
    this.controller = new AbortController();
    this.button.textContent = "Stop";
    shown.element.ariaBusy = true;
    const began = performance.now();
    try {
      await this.read(talk, answer, shown, began, this.controller.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.facts.push("stopped");
      else {
        answer.facts.push(error instanceof Refused ? error.message : `The connection broke: ${error.message}`);
        if (error.status === 401) this.say(error.message, true);
      }
    }
    this.controller = this.answered = null;
    this.button.textContent = "Send";
    shown.element.ariaBusy = false;
    shown.draw();
    if (this.model.length > 1) this.findModels(); // it may have been loaded for this answer
    if (this.store.talks.includes(talk)) saveTalk(talk); // it was not deleted meanwhile
  }

  async read(talk, answer, shown, began, signal) {
    const messages = talk.messages.slice(0, -1).filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
    if (talk.system.trim()) messages.unshift({ role: "system", content: talk.system });
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...this.cards[this.model.value]?.chat_parameters, ...this.store.settings };
    if (this.model.value) body.model = this.model.value;
    const response = await ask("v1/chat/completions", { body, signal });
    let first = null;
    let usage = null;
    let last = began;
    try {
      for await (const [, data] of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(500, chunk.error.message);
        usage = chunk.usage ?? usage;
        const delta = chunk.choices?.[0]?.delta ?? {};
        const reasoning = delta.reasoning_content ?? delta.reasoning;
        if (!delta.content && !reasoning) continue;
        last = performance.now();
        first ??= last;
        answer.content += delta.content ?? "";
        answer.reasoning += reasoning ?? "";
        const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        shown.drawSoon(() => { if (follows) this.log.scrollTop = this.log.scrollHeight; });
      }
    } finally {
      if (first) answer.facts.push(`first token ${seconds((first - began) / 1000)}`);
    }
    if (usage) {
      const count = usage.completion_tokens;
      if (last > first && count > 1) answer.facts.unshift(`${number((count - 1) / ((last - first) / 1000))} tok/s`);
      answer.facts.push(`${count} tokens`, `prompt ${usage.prompt_tokens}, ${usage.prompt_tokens_details?.cached_tokens ?? 0} cached`);
    }
    answer.timeline = await timeline(response.headers.get("x-request-id"));
  }

  say(words, wantsKey) {
    this.log.querySelector(".notice")?.remove();
    this.log.append(h("p.notice", { role: "status" }, words, " ", ...(wantsKey ? [h("button", { onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key")] : [])));
  }
}

// The server keeps it a moment after the last byte is out.
async function timeline(id) {
  for (const wait of [50, 250, 1000]) {
    await new Promise((done) => setTimeout(done, wait));
    try {
      return (await (await ask(`v1/requests/${encodeURIComponent(id)}/timeline`)).json()).segments;
    } catch { /* not there yet, or not kept */ }
  }
  return null;
}

function bubble(message) {
  const text = h("div.text");
  const facts = h("p.facts-line");
  const element = h(`article.${message.role}`, { ariaLabel: message.role === "user" ? "You" : "Model" }, text, facts);
  let asked = false;
  const draw = () => {
    if (message.role === "user") text.textContent = message.content;
    else text.replaceChildren(...(message.reasoning ? [h("details.reasoning", { open: !message.content }, h("summary", {}, "Reasoning"), message.reasoning)] : []), rendered(message.content));
    const segments = message.timeline?.map(({ name, seconds: value }) => `${name} ${seconds(value)}`).join(", ");
    facts.replaceChildren(message.facts?.join(" · ") ?? "", ...(segments ? [h("br"), h("span", {}, segments)] : []));
  };
  draw();
  return { element, draw, drawSoon: (then) => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); then(); });
  } };
}

function rendered(content) {
  try {
    return markdown(content);
  } catch {
    return h("p", {}, content); // nested without end: as it came
  }
}
