// The list of conversations: search, rename, delete, and files in and out.
import { h } from "./dom.js";
import { titleOf } from "./talks.js";
import { download, iconButton, note } from "./widgets.js";
import { fromText, toJson } from "./transfer.js";

const DAY = 86_400_000;

export class Sidebar {
  // `acts`: begin, open, remove, rename, add, isRunning.
  constructor(store, acts) {
    this.store = store;
    this.acts = acts;
    this.current = null;
    this.search = h("input", { type: "search", placeholder: "Search", ariaLabel: "Search conversations", oninput: () => this.draw() });
    this.list = h("div.conversations");
    this.file = h("input", { type: "file", accept: ".json,.md,.txt", multiple: true, hidden: true, ariaLabel: "Files of conversations", onchange: () => this.take([...this.file.files]) });
    this.element = h("aside.side", { id: "chat-side", ariaLabel: "Conversations" },
      h("button.begin", { type: "button", onclick: () => acts.begin() }, "New conversation"),
      this.search, this.list,
      h("div.files", {}, h("button", { type: "button", onclick: () => this.file.click() }, "Import"), h("button", { type: "button", onclick: () => this.exportAll() }, "Export all"), this.file));
  }

  draw(current = this.current) {
    this.current = current;
    if (this.list.querySelector("input")) return; // a name is being typed
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.store.talks.filter((talk) => talk.messages.length && (!wanted || matches(talk, wanted)));
    const state = JSON.stringify(found.map((talk) => [talk.id, titleOf(talk), ageOf(talk.changed), this.acts.isRunning(talk), talk === current]).concat(wanted));
    if (state === this.drawn) return;
    this.drawn = state;
    const groups = new Map();
    for (const talk of found) {
      const age = ageOf(talk.changed);
      if (!groups.has(age)) groups.set(age, []);
      groups.get(age).push(this.item(talk));
    }
    const place = this.list.scrollTop;
    this.list.replaceChildren(...[...groups].flatMap(([age, items]) => [h("h2", {}, age), h("ul", {}, ...items)]));
    if (!found.length) this.list.append(h("p.faint", {}, wanted ? "No conversation has these words." : "No conversations yet."));
    this.list.scrollTop = place;
  }

  item(talk) {
    const title = titleOf(talk);
    const name = h("button.name", { type: "button", title, ariaCurrent: talk === this.current, onclick: () => this.acts.open(talk), ondblclick: () => this.rename(talk) }, title);
    const running = this.acts.isRunning(talk) ? [h("span.dots", { role: "img", ariaLabel: "is being answered" })] : [];
    const item = h("li", {}, name, ...running,
      iconButton("edit", `Rename “${title}”`, () => this.rename(talk)), iconButton("remove", `Delete “${title}”`, () => this.acts.remove(talk)));
    item.dataset.id = talk.id;
    return item;
  }

  rename(talk) {
    const item = [...this.list.querySelectorAll("li")].find(({ dataset }) => dataset.id === talk.id);
    if (!item) return;
    const input = h("input", { value: titleOf(talk), ariaLabel: "Name of the conversation", maxLength: 200 });
    let isDone = false;
    const end = (isKept) => {
      if (isDone) return;
      isDone = true;
      const name = input.value.trim();
      input.remove();
      this.drawn = null;
      if (isKept && name && name !== titleOf(talk)) this.acts.rename(talk, name);
      this.draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      else if (event.key === "Escape") end(false);
      else return;
      event.stopPropagation();
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
    input.focus();
  }

  exportAll() {
    const talks = this.store.talks.filter(({ messages }) => messages.length).map(toJson);
    if (talks.length) download("headrace-conversations.json", "application/json", JSON.stringify(talks, null, 2));
    else note("There are no conversations to export.");
  }

  async take(files) {
    this.file.value = "";
    for (const file of files) {
      try {
        const talks = fromText(await file.text());
        for (const talk of talks) if (!talk.title) talk.title = file.name.replace(/\.\w+$/, "");
        if (this.acts.add(talks)) note(talks.length === 1 ? `“${titleOf(talks[0])}” was imported.` : `${talks.length} conversations were imported.`);
      } catch (error) {
        note(`${file.name} was not imported: ${error.message}.`);
      }
    }
  }
}

const matches = (talk, wanted) => titleOf(talk).toLowerCase().includes(wanted) || talk.messages.some(({ content }) => content.toLowerCase().includes(wanted));

function ageOf(changed) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (changed >= midnight) return "Today";
  if (changed >= midnight - DAY) return "Yesterday";
  return changed >= midnight - 7 * DAY ? "Last 7 days" : "Older";
}
