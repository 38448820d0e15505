// One message as it is shown: its text, what is folded, what can be done with it, and what is known of it.
import { h, seconds } from "./dom.js";
import { Growing } from "./markdown.js";
import { copyButton, icon, iconButton } from "./widgets.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result of a tool", system: "System" };

export class Message {
  // `acts` is what the chat can do: retry, edit, goOn, choose. `isBusy` while it is being answered.
  constructor(message, acts, { isBusy = false, isLast = false, waiting = "" } = {}) {
    Object.assign(this, { message, acts, isBusy, isLast, waiting });
    this.calls = h("div");
    this.text = h("div.text");
    this.under = h("div.under");
    this.foot = h("div.foot");
    this.element = h(`article.${NAMES[message.role] ? message.role : "system"}`, { ariaLabel: NAMES[message.role] ?? message.role }, this.text, this.calls, this.under, this.foot);
    this.element.dataset.role = message.role;
    this.markdown = new Growing(this.text);
    this.cost = 0; // milliseconds that the last drawing took
    this.draw();
  }

  // Returns itself, drawn again if that changes anything.
  become(state) {
    const isSame = this.isBusy === state.isBusy && this.isLast === state.isLast;
    Object.assign(this, state);
    if (!isSame) this.draw();
    return this;
  }

  draw() {
    const began = performance.now();
    const { message, isBusy } = this;
    this.element.ariaBusy = isBusy;
    if (message.role === "assistant") this.drawAnswer();
    else if (message.role === "tool") this.text.replaceChildren(folded("Result of a tool", message.content));
    else this.text.textContent = message.content;
    this.under.replaceChildren(...this.remarks());
    this.foot.replaceChildren(...(isBusy ? [] : this.actions()));
    this.cost = performance.now() - began;
  }

  // Draws at the next frame, and less often where that takes long.
  drawSoon(then) {
    if (this.isAsked) return;
    this.isAsked = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.isAsked = false;
      this.draw();
      then();
    }), Math.min(4 * this.cost, 2000));
  }

  drawAnswer() {
    const { message, isBusy } = this;
    if (message.reasoning) this.drawReasoning(isBusy && !message.content && !message.tool_calls);
    try {
      this.markdown.update(message.content);
    } catch (error) {
      console.warn(error);
      this.text.replaceChildren(h("p", {}, message.content)); // as it came
      this.markdown = new Growing(this.text);
    }
    this.text.hidden = !message.content;
    this.calls.replaceChildren(...(message.tool_calls ?? []).filter(Boolean).map(({ function: called }) => folded(`Call of ${called?.name}`, indented(called?.arguments))));
  }

  // Open while there is nothing else to read, and folded from the first word of the answer on.
  drawReasoning(isUnderWay) {
    if (!this.thoughts) {
      this.reasoning = h("div.reasoning-text");
      this.thoughts = h("details.folded.reasoning", { open: isUnderWay }, h("summary"), this.reasoning);
      this.text.before(this.thoughts);
    }
    if (this.wasUnderWay && !isUnderWay) this.thoughts.open = false;
    this.wasUnderWay = isUnderWay;
    this.thoughts.firstChild.textContent = isUnderWay ? "Reasoning …" : "Reasoning";
    this.reasoning.textContent = this.message.reasoning;
  }

  remarks() {
    const { message, isBusy } = this;
    if (isBusy) return message.content || message.reasoning || message.tool_calls ? [] : [h("p.waiting", {}, h("span.dots", {}), this.waiting)];
    const made = [];
    if (message.error) {
      const buttons = [h("button", { onclick: () => this.acts.retry(message) }, "Retry")];
      if (message.error.status === 401) buttons.unshift(h("button", { onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key"));
      made.push(h("div.error", {}, icon("warn"), h("p", {}, message.error.words), ...buttons));
    }
    if (message.warning) made.push(h("p.warning", {}, message.warning));
    if (message.role === "assistant" && message.end === "stopped") made.push(h("p.end", {}, "Stopped."));
    if (message.end === "length") made.push(h("p.end", {}, "Cut: the answer reached its most tokens, or the end of the context."));
    return made;
  }

  actions() {
    const { message, acts } = this;
    const made = [];
    if (message.versions) made.push(this.switcher());
    if (message.content) made.push(copyButton("Copy this message", () => message.content));
    if (message.role === "user") made.push(iconButton("edit", "Edit and send again", () => this.edit()));
    if (message.role === "assistant") {
      if (!message.error) made.push(iconButton("refresh", "Answer again", () => acts.retry(message)));
      if (this.isLast && message.content && message.end && message.end !== "stop" && message.end !== "tool_calls") {
        made.push(h("button.bare.worded", { type: "button", onclick: () => acts.goOn(message) }, icon("continue"), "Continue"));
      }
      made.push(...this.facts());
    }
    return made;
  }

  facts() {
    const { facts, timeline, model } = this.message;
    if (!facts?.length) return [];
    const segments = timeline?.map(({ name, seconds: value }) => `${name} ${seconds(value)}`).join(", ");
    const more = [segments, model].filter(Boolean);
    const isShort = (fact) => !fact.startsWith("prompt");
    const line = facts.filter(isShort).join(" · ");
    return [h("details.facts-line", {}, h("summary", { title: "More about this answer" }, line || "About this answer"), h("p", {}, ...facts.filter((fact) => !isShort(fact)).map((fact) => h("span", {}, fact)), ...more.map((each) => h("span", {}, each))))];
  }

  switcher() {
    const { message, acts } = this;
    const { versions, version } = message;
    const to = (step, name, words) => iconButton(name, words, () => acts.choose(message, version + step), { disabled: !(version + step in versions) });
    return h("span.versions", {}, to(-1, "left", "The version before"), h("span", {}, `${version + 1} / ${versions.length}`), to(1, "right", "The version after"));
  }

  // Turns the message into a field; what is sent from it is another version of the message.
  edit(text = this.message.content) {
    const input = h("textarea", { value: text, ariaLabel: "Edit the message", rows: Math.min(12, text.split("\n").length + 1) });
    const leave = () => { this.editor = null; form.remove(); this.text.hidden = this.foot.hidden = false; this.element.classList.remove("edited"); };
    const send = () => { if (input.value.trim() && this.acts.edit(this.message, input.value.trim())) leave(); };
    const form = h("form.edit", { onsubmit: (event) => { event.preventDefault(); send(); } }, input,
      h("div.actions", {}, h("button", { type: "button", onclick: leave }, "Cancel"), h("button.primary", { type: "submit" }, "Send")));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.editor = input;
    this.text.hidden = this.foot.hidden = true;
    this.element.classList.add("edited");
    this.text.before(form);
    input.focus();
  }
}

function folded(words, text) {
  return h("details.folded", {}, h("summary", {}, words), h("pre", { tabIndex: 0 }, text ?? ""));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text ?? "";
  }
}
