// Chat: conversations with the model, kept in this browser only. Answers go on while another conversation is shown.
import { Run, sent } from "./answer.js";
import { Attachments } from "./attach.js";
import { h } from "./dom.js";
import { Message } from "./message.js";
import { Options } from "./options.js";
import { Shortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { branch, choose, forget, fresh, load, onOtherTab, replaceLast, saveTalk, titleOf } from "./talks.js";
import { download, icon, iconButton, menu, note } from "./widgets.js";
import { fileName, toJson, toMarkdown } from "./transfer.js";

const NEAR = 60; // pixels from the end, within which the log follows an answer
const IDEAS = ["Explain what a headrace is, in three sentences", "Write a Python function that finds the primes below n", "Compare tea and coffee in a table"];
const isTouched = matchMedia("(pointer: coarse)");
const isWide = matchMedia("(min-width: 800px)");

export class Chat {
  constructor(root) {
    this.root = root;
    this.store = load();
    this.runs = new Map(); // by conversation
    this.drafts = new Map();
    this.views = [];
    this.follows = true;
    this.options = new Options(this.store, { changed: (error) => this.drawAround(error), systemChanged: (words) => { this.talk.system = words; if (this.talk.messages.length) this.save(this.talk); this.drawAround(); } });
    this.side = new Sidebar(this.store, {
      begin: () => this.begin(), open: (talk) => this.open(talk), remove: (talk) => this.remove(talk), add: (talks) => this.add(talks),
      rename: (talk, title) => { talk.title = title; this.save(talk); this.drawAround(); }, isRunning: (talk) => this.runs.has(talk),
    });
    this.acts = {
      retry: (message) => this.retry(message), edit: (message, words) => this.edit(message, words),
      goOn: (message) => this.answer(this.talk, message), choose: (message, version) => this.choose(message, version),
    };
    this.build();
    this.shortcuts = new Shortcuts(root, {
      begin: () => this.begin(), search: () => this.toggleSide(true) || this.side.search.focus(), focus: () => this.input.focus(), stop: () => this.escape(),
      edit: () => this.views.findLast(({ message }) => message.role === "user")?.edit(), retry: () => this.retry(this.talk.messages.at(-1)),
      options: () => this.options.toggle(), step: (by) => this.step(by),
    });
    this.foot.append(iconButton("help", "Keyboard shortcuts", () => this.shortcuts.help()));
    this.open(this.store.talks[0] ?? fresh());
    onOtherTab((id, talk) => this.hear(id, talk));
    addEventListener("pagehide", () => this.leaveForGood());
  }

  build() {
    this.sideButton = iconButton("menu", "Conversations", () => this.toggleSide(), { ariaExpanded: "false" });
    this.sideButton.setAttribute("aria-controls", "chat-side");
    this.title = h("h2.title");
    this.column = h("div.column");
    this.log = h("div.log", { role: "log", ariaLive: "off", ariaLabel: "Conversation", tabIndex: 0 }, this.column);
    this.newest = h("button.newest", { type: "button", hidden: true, onclick: () => this.toEnd(true) }, icon("down"), "Newest");
    this.input = h("textarea", { rows: 1, ariaLabel: "Message", placeholder: "Ask something", oninput: () => this.grow() });
    this.button = h("button.primary.send", { type: "submit" });
    this.foot = h("div.compose-foot");
    this.state = h("button.bare.what-is-set", { type: "button", title: "Settings", onclick: () => this.options.toggle() });
    this.news = h("p.unseen", { role: "status", ariaLive: "polite" });
    this.notice = h("p.notice", { role: "status", hidden: true });
    const form = h("form.compose", { onsubmit: (event) => { event.preventDefault(); this.isAnswering ? this.stop() : this.send(); } }, h("div.box", {}, this.input, this.button), this.foot);
    const attach = new Attachments(this.root, (text) => this.insert(text));
    this.input.before(attach.button, attach.file);
    this.foot.append(this.state);
    const toolbar = h("div.toolbar", {}, this.sideButton, this.title, h("span.spacer"), this.options.model, this.options.button,
      menu("more", "More about this conversation", [
        ["Rename", () => this.toggleSide(true) || this.side.rename(this.talk)], ["Export as JSON", () => this.exportTalk("json")], ["Export as Markdown", () => this.exportTalk("md")],
        ["Import", () => this.side.file.click()], ["Delete", () => this.remove(this.talk)],
      ]));
    const veil = h("div.veil", { onclick: () => this.toggleSide(false) });
    this.root.append(this.side.element, veil, h("div.talk", {}, toolbar, this.notice, h("div.log-place", {}, this.log, this.newest), form), this.options.panel, this.news);
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return; // a phone has no Shift+Enter
      event.preventDefault();
      if (!this.isAnswering) this.send();
    });
    this.log.addEventListener("scroll", () => {
      this.follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR;
      this.newest.hidden = this.follows;
    });
    this.toggleSide(isWide.matches);
    isWide.addEventListener("change", ({ matches }) => this.toggleSide(matches));
  }

  enter() {
    if (!isTouched.matches) this.input.focus();
    this.options.findModels();
    this.grow();
    this.toEnd();
  }

  // Keeps what came of answers under way, before the browser breaks their connections.
  leaveForGood() {
    const talks = [...this.runs.keys()];
    this.runs.clear();
    for (const talk of talks) this.save(talk);
  }

  get isAnswering() { return this.runs.has(this.talk); }

  // --- conversations

  begin() {
    this.open(fresh());
    this.input.focus();
  }

  open(talk) {
    if (this.talk) this.drafts.set(this.talk, this.input.value);
    this.talk = talk;
    this.input.value = this.drafts.get(talk) ?? "";
    this.options.system.value = talk.system;
    if (!isWide.matches) this.toggleSide(false);
    this.drawLog();
    this.grow();
    this.toEnd(true);
  }

  step(by) {
    const talks = this.store.talks.filter(({ messages }) => messages.length);
    const next = talks[Math.max(0, Math.min(talks.length - 1, talks.indexOf(this.talk) + by))];
    if (next) this.open(next);
  }

  remove(talk) {
    this.runs.get(talk)?.stop();
    this.runs.delete(talk);
    forget(talk);
    this.store.talks = this.store.talks.filter((each) => each !== talk);
    if (talk === this.talk) this.open(this.store.talks[0] ?? fresh());
    else this.drawAround();
    if (talk.messages.length) note(`“${titleOf(talk)}” was deleted.`, "Undo", () => this.add([Object.assign(talk, { changed: 0 })]));
  }

  // Returns whether there was room for all of them.
  add(talks) {
    const kept = [...talks].reverse().map((talk) => this.save(talk)); // the first is on top
    this.open(talks[0]);
    return kept.every(Boolean);
  }

  exportTalk(form) {
    if (form === "md") download(`${fileName(this.talk)}.md`, "text/markdown", toMarkdown(this.talk));
    else download(`${fileName(this.talk)}.json`, "application/json", JSON.stringify(toJson(this.talk), null, 2));
  }

  save(talk) {
    const { other, isFull } = saveTalk(talk);
    const others = this.store.talks.filter((each) => each !== talk && each.id !== other?.id);
    this.store.talks = [talk, ...(other ? [other] : []), ...others];
    if (other) note("Another tab went on with this conversation: what was written here is a copy of its own.");
    if (isFull) note("This browser has no room left: the conversation is not kept. Export it, or delete others.");
    return !isFull;
  }

  // Another tab has changed a conversation. What is being answered here is this tab's.
  hear(id, talk) {
    const known = this.store.talks.find((each) => each.id === id);
    if (known && this.runs.has(known)) return;
    if (talk && known) Object.assign(known, talk);
    else if (talk) this.store.talks.unshift(talk);
    else this.store.talks = this.store.talks.filter((each) => each !== known);
    if (!known || known !== this.talk) return this.side.draw();
    if (!talk) return this.open(this.store.talks[0] ?? fresh());
    const index = this.views.findIndex(({ editor }) => editor);
    const words = this.views[index]?.editor.value;
    this.options.system.value = known.system;
    this.drawLog();
    if (index >= 0) this.views[index]?.edit(words);
  }

  // Puts the text of a file where the cursor is, apart from what is written around it.
  insert(text) {
    const { value, selectionStart: begin, selectionEnd: end } = this.input;
    const [before, after] = [value.slice(0, begin).trimEnd(), value.slice(end).trimStart()];
    const head = `${before ? `${before}\n\n` : ""}${text}\n\n`;
    this.input.value = head + after;
    this.grow();
    this.input.focus();
    this.input.setSelectionRange(head.length, head.length);
  }

  // --- questions and answers

  send() {
    const content = this.input.value.trim();
    if (!content) return;
    this.input.value = "";
    this.grow();
    this.talk.messages.push({ role: "user", content });
    this.answer(this.talk);
  }

  // Asks for an answer to what the conversation has, or for more of one that was stopped.
  async answer(talk, more = null) {
    if (this.runs.has(talk)) return;
    const answer = more ?? { role: "assistant", content: "" };
    const last = talk.messages.at(-1);
    if (!more && last.role === "assistant" && !last.content) replaceLast(talk, answer);
    else if (!more) talk.messages.push(answer);
    answer.model = talk.model = this.options.model.value || null;
    const run = new Run(answer, { changed: () => this.viewOf(answer)?.drawSoon(() => this.toEnd()), save: () => this.save(talk) });
    this.runs.set(talk, run);
    const body = () => ({
      messages: sent(talk, more ? talk.messages : talk.messages.slice(0, -1)), stream: true, stream_options: { include_usage: true }, ...this.options.request(),
      ...(more ? { continue_final_message: true, add_generation_prompt: false } : {}),
    });
    this.save(talk);
    if (talk === this.talk) {
      this.drawLog();
      this.toEnd(true);
      if (!isTouched.matches) this.input.focus(); // the button that was pressed is gone
    }
    try {
      await run.read(body());
    } catch (error) { // of the settings
      Object.assign(answer, { end: "failed", error: { status: 0, words: error.message } });
    }
    if (this.runs.get(talk) !== run) return; // it was deleted meanwhile
    this.runs.delete(talk);
    this.save(talk);
    this.announce(answer);
    if (talk === this.talk) this.drawLog();
    else this.drawAround();
    if (this.options.mustLoad) this.options.findModels(); // it may have been loaded for this answer
  }

  retry(message) {
    const { talk } = this;
    const index = talk.messages.indexOf(message);
    if (index < 0 || message.role !== "assistant" || this.mustWait()) return;
    if (index === talk.messages.length - 1 && !message.content) return this.answer(talk);
    branch(talk, index, { role: "assistant", content: "" });
    this.answer(talk);
  }

  // Returns whether it could be sent.
  edit(message, content) {
    const index = this.talk.messages.indexOf(message);
    if (index < 0 || this.mustWait()) return false;
    branch(this.talk, index, { role: "user", content });
    this.answer(this.talk);
    return true;
  }

  choose(message, version) {
    if (this.mustWait()) return;
    choose(this.talk, this.talk.messages.indexOf(message), version);
    this.save(this.talk);
    this.drawLog();
  }

  // What is being answered does not change meanwhile.
  mustWait() {
    if (this.isAnswering) note("An answer is being written. Stop it first, or wait for its end.");
    return this.isAnswering;
  }

  stop() { this.runs.get(this.talk)?.stop(); }

  escape() {
    if (!isWide.matches && this.root.classList.contains("has-side")) this.toggleSide(false);
    else if (!this.options.panel.hidden && this.options.panel.contains(document.activeElement)) this.options.toggle(false);
    else this.stop();
  }

  announce({ end, error, facts }) {
    this.news.textContent = error ? `The answer failed: ${error.words}` : end === "stopped" ? "The answer was stopped." : `The answer is finished: ${facts.find((each) => /tokens?$/.test(each)) ?? ""}`;
  }

  // --- drawing

  viewOf(message) { return this.views.find((view) => view.message === message); }

  drawLog() {
    const { messages } = this.talk;
    const waiting = this.options.mustLoad ? "Waiting for the model to be loaded" : "Waiting for the first token";
    const known = new Map(this.views.map((view) => [view.message, view]));
    this.views = messages.map((message, index) => {
      const isLast = index === messages.length - 1;
      const state = { isLast, isBusy: isLast && this.isAnswering, waiting };
      return known.get(message)?.become(state) ?? new Message(message, this.acts, state);
    });
    this.place(this.views.map(({ element }) => element));
    if (!messages.length) this.column.append(this.hello());
    this.toEnd();
    this.drawAround();
  }

  // Puts the elements into the column; those that are in their place already are not touched, so that they keep the focus.
  place(elements) {
    const { children } = this.column;
    const wanted = new Set(elements);
    for (const each of [...children]) if (!wanted.has(each)) each.remove();
    elements.forEach((each, index) => { if (children[index] !== each) this.column.insertBefore(each, children[index] ?? null); });
  }

  hello() {
    const ideas = IDEAS.map((words) => h("button", { type: "button", onclick: () => { this.input.value = words; this.grow(); this.input.focus(); } }, words));
    return h("div.hello", {}, h("img", { src: "dashboard/files/icon.svg", alt: "", width: 44, height: 44 }), h("p.lead", {}, "What would you like to know?"),
      h("div.ideas", {}, ...ideas), h("p.faint", {}, "What you write goes to this server and nowhere else. Conversations are kept in this browser."));
  }

  // All but the messages: the list, the title, the button, and the lines that say what is set.
  drawAround(error = null) {
    this.side.draw(this.talk);
    this.title.textContent = this.title.title = this.talk.messages.length ? titleOf(this.talk) : "";
    this.title.hidden = !this.talk.messages.length;
    const words = this.isAnswering ? "Stop" : "Send";
    if (this.button.ariaLabel !== words) {
      this.button.replaceChildren(icon(this.isAnswering ? "stop" : "up"));
      this.button.ariaLabel = this.button.title = words;
    }
    const used = this.talk.messages.findLast((message) => message.used)?.used;
    const room = used && this.options.longest ? `${used.toLocaleString("en")} of ${this.options.longest.toLocaleString("en")} tokens` : "";
    this.state.textContent = [this.options.summary() || "the model’s settings", room].filter(Boolean).join(" · ");
    this.notice.hidden = !this.options.words;
    const wantsKey = error?.status === 401 ? [" ", h("button", { type: "button", onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key")] : [];
    this.notice.replaceChildren(this.options.words, ...wantsKey);
  }

  toggleSide(isOpen = !this.root.classList.contains("has-side")) {
    this.root.classList.toggle("has-side", isOpen);
    this.sideButton.ariaExpanded = String(isOpen);
    if (isOpen && !isWide.matches) this.side.element.querySelector("button").focus();
  }

  toEnd(isForced = false) {
    if (isForced) this.follows = true;
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
    this.newest.hidden = this.follows;
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }
}
