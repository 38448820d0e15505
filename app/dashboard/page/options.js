// The model and its settings: the selection, the panel, and a line that says what is set.
import { h } from "./dom.js";
import { ask, Refused } from "./server.js";
import { saveSettings } from "./talks.js";
import { iconButton } from "./widgets.js";

const SETTINGS = [
  ["temperature", "0 takes the likeliest token; higher is more varied", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "keep the likeliest tokens that have this share together", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "keep so many of the likeliest tokens", { min: 0, step: 1 }],
  ["min_p", "drop tokens below this share of the likeliest", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "above 1 discourages repeating", { min: 0.01, max: 10, step: 0.01 }],
  ["frequency_penalty", "discourages tokens by how often they came", { min: -2, max: 2, step: 0.1 }],
  ["max_tokens", "the longest answer", { min: 1, step: 1 }],
  ["seed", "the same seed, the same answer", { step: 1 }],
];
const AGAIN = 2000; // milliseconds, while the server does not answer

export class Options {
  // `changed` is called when what is set has changed, `systemChanged` with a new system prompt.
  constructor(store, { changed, systemChanged }) {
    this.store = store;
    this.changed = changed;
    this.cards = {};
    this.words = "";
    this.model = h("select.model", { ariaLabel: "Model", onchange: () => { store.model = this.model.value; this.save(); } });
    this.system = h("textarea", { rows: 4, ariaLabel: "System prompt", placeholder: "Instructions for this conversation", oninput: () => systemChanged(this.system.value) });
    this.more = h("textarea.json", { rows: 3, ariaLabel: "More fields", placeholder: '{"stop": ["END"]}', value: store.settings.more ?? "", oninput: () => { store.settings.more = this.more.value; this.save(); } });
    this.wrong = h("p.wrong", { role: "status", hidden: true });
    this.fields = Object.fromEntries(SETTINGS.map(([name, , range]) => [name, h("input", { type: "number", placeholder: "model’s", ...range, value: store.settings[name] ?? "", oninput: () => this.set(name) })]));
    this.close = iconButton("close", "Close the settings", () => this.toggle(false));
    this.panel = h("aside.options", { id: "chat-options", ariaLabel: "Settings", hidden: true },
      h("div.panel-head", {}, h("h2", {}, "Settings"), this.close),
      h("label", {}, "System prompt ", this.system),
      ...SETTINGS.map(([name, hint]) => h("label.setting", { title: hint }, h("span", {}, name.replaceAll("_", " ")), this.fields[name])),
      h("label", {}, "More fields of the request, as JSON ", this.more), this.wrong,
      h("button", { type: "button", onclick: () => this.reset() }, "Use the model’s settings"));
    this.button = iconButton("settings", "Settings", () => this.toggle(), { ariaExpanded: "false" });
    this.button.setAttribute("aria-controls", "chat-options");
    this.check();
  }

  toggle(isOpen = this.panel.hidden) {
    this.panel.hidden = !isOpen;
    this.button.ariaExpanded = String(isOpen);
    if (isOpen) this.system.focus();
    else this.button.focus();
  }

  async findModels() {
    clearTimeout(this.again);
    try {
      const { data } = await (await ask("v1/models")).json();
      this.cards = Object.fromEntries(data.map((card) => [card.id, card]));
      this.model.replaceChildren(...data.map(({ id, status }) => h("option", { value: id, selected: id === this.store.model }, data.length > 1 && status !== "loaded" ? `${id} (${status})` : id)));
      this.model.disabled = data.length < 2;
      this.words = "";
    } catch (error) {
      this.words = error.message;
      if (error instanceof Refused && error.status === 401) return this.changed(error);
      this.again = setTimeout(() => this.findModels(), AGAIN); // it may be loading
      this.words = error instanceof Refused ? error.message : "The server does not answer; trying again.";
    }
    this.changed();
  }

  // Whether the model that will answer has yet to be loaded.
  get mustLoad() {
    const { status } = this.cards[this.model.value] ?? {};
    return status !== undefined && status !== "loaded";
  }

  get longest() { return this.cards[this.model.value]?.max_model_len; }

  // The fields of a request. Throws what is wrong with those that were written as JSON.
  request() {
    const { more, ...settings } = this.store.settings;
    const fields = { ...this.cards[this.model.value]?.chat_parameters, ...settings, ...fieldsOf(more) };
    if (this.model.value) fields.model ??= this.model.value;
    return fields;
  }

  // What differs from the model's own settings, in words.
  summary() {
    const { more, ...settings } = this.store.settings;
    const said = Object.entries(settings).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
    if (this.system.value.trim()) said.push("system prompt");
    if (more?.trim()) said.push("more fields");
    return said.join(" · ");
  }

  set(name) {
    const { value, valueAsNumber } = this.fields[name];
    if (value === "" || Number.isNaN(valueAsNumber)) delete this.store.settings[name];
    else this.store.settings[name] = valueAsNumber;
    this.save();
  }

  reset() {
    this.store.settings = {};
    for (const field of [...Object.values(this.fields), this.more]) field.value = "";
    this.save();
  }

  save() {
    saveSettings(this.store);
    this.check();
    this.changed();
  }

  check() {
    const { default_parameters: defaults, chat_parameters: ours } = this.cards[this.model.value] ?? {};
    for (const [name] of SETTINGS) this.fields[name].placeholder = ours?.[name] ?? defaults?.[name] ?? "model’s";
    let words = "";
    try {
      fieldsOf(this.store.settings.more);
    } catch (error) {
      words = error.message;
    }
    this.wrong.textContent = words;
    this.wrong.hidden = !words;
  }
}

function fieldsOf(text) {
  if (!text?.trim()) return {};
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`More fields: it is not JSON (${error.message})`);
  }
  if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("More fields: it must be a JSON object, such as {\"stop\": [\"END\"]}");
  return found;
}
