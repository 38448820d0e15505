// The chat's keys, and the window that lists them.
import { h } from "./dom.js";
import { icon } from "./widgets.js";

const KEYS = [
  ["Enter", "send the message"], ["Shift + Enter", "begin a new line"], ["Esc", "stop the answer, or close what is open"],
  ["↑ in an empty field", "edit the last question"], ["Ctrl + Shift + O", "new conversation"], ["Ctrl + K", "search conversations"],
  ["Alt + ↑ or ↓", "the conversation above or below"], ["Ctrl + Shift + Y", "answer again"], ["Ctrl + ,", "settings"], ["/", "write a message"], ["?", "show this list"],
];

export class Shortcuts {
  // `acts`: begin, search, focus, stop, edit, retry, options, step.
  constructor(root, acts) {
    this.root = root;
    this.acts = acts;
    const rows = KEYS.map(([key, words]) => h("div", {}, h("dt", {}, ...key.split(" + ").flatMap((each, index) => (index ? [" + ", h("kbd", {}, each)] : [h("kbd", {}, each)]))), h("dd", {}, words)));
    this.dialog = h("dialog.shortcuts", { ariaLabel: "Keyboard shortcuts" }, h("form", { method: "dialog" }, h("div.panel-head", {}, h("h2", {}, "Keyboard shortcuts"), h("button.bare", { ariaLabel: "Close" }, icon("close")))), h("dl", {}, ...rows));
    root.append(this.dialog);
    document.addEventListener("keydown", (event) => this.take(event));
  }

  help() { this.dialog.showModal(); }

  take(event) {
    if (this.root.hidden || event.isComposing || document.querySelector("dialog[open]")) return;
    const act = this.actOf(event);
    if (!act) return;
    event.preventDefault();
    act();
  }

  actOf({ key, ctrlKey, metaKey, shiftKey, altKey, target }) {
    const { acts } = this;
    const isCommand = ctrlKey || metaKey;
    if (key === "Escape") return target.matches("[type=search]") && target.value ? null : acts.stop; // the field empties itself
    if (isCommand && shiftKey) return { o: acts.begin, y: acts.retry }[key.toLowerCase()];
    if (isCommand) return { k: acts.search, ",": acts.options }[key];
    if (altKey) return { ArrowUp: () => acts.step(-1), ArrowDown: () => acts.step(1) }[key];
    const isField = target.matches("input, textarea, select");
    if (isField) return key === "ArrowUp" && target.matches(".compose textarea") && !target.value ? acts.edit : null;
    return { "/": acts.focus, "?": () => this.help() }[key];
  }
}
