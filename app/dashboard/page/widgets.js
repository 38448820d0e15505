// What the page is put together from, beside plain elements: icons, buttons that have one, menus, and short notes.
import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ICONS = { // strokes on a square of 24
  copy: "M9 9h10v11H9zM5 15V4h10", check: "M5 12.5l4.5 4.5L19 7", refresh: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6", edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", menu: "M4 7h16M4 12h16M4 17h16", plus: "M12 5v14M5 12h14", down: "M12 5v14M6 13l6 6 6-6", up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6", more: "M5 12h.01M5 12h.01M12 12h.01M19 12h.01", search: "M16 16l4 4M10.5 17a6.5 6.5 0 1 0 0-13 6.5 6.5 0 0 0 0 13z",
  settings: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4", close: "M6 6l12 12M18 6L6 18", continue: "M5 5l8 7-8 7M16 5v14", warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5", dark: "M20 14A8.5 8.5 0 0 1 10 4a8.5 8.5 0 1 0 10 10z",
  help: "M9 9.5a3 3 0 1 1 4.2 2.7c-.8.4-1.2 1-1.2 1.8M12 17h.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4", attach: "M19 11l-7.5 7.5a4.2 4.2 0 0 1-6-6L13 5a2.8 2.8 0 0 1 4 4l-7.5 7.5a1.4 1.4 0 0 1-2-2L14 8",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// A button that is an icon; `label` is its name and its hint.
export const iconButton = (name, label, onclick, attributes = {}) => h("button.bare", { type: "button", ariaLabel: label, title: label, onclick, ...attributes }, icon(name));

// Copies what `text` returns, and shows for a moment that it did.
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const isDone = await copy(text());
    button.replaceChildren(icon(isDone ? "check" : "warn"));
    button.title = button.ariaLabel = isDone ? "Copied" : "The browser does not let pages copy";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = button.ariaLabel = label;
    }, 1500);
  });
  return button;
}

// Without TLS, browsers have a clipboard on this machine only; the old way works elsewhere too.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const place = h("textarea.unseen", { value: text });
    const focused = document.activeElement;
    document.body.append(place);
    place.select();
    const isDone = document.execCommand("copy");
    place.remove();
    focused?.focus();
    return isDone;
  }
}

// A button that opens a list of actions, each [name, what it does].
export function menu(name, label, actions) {
  const list = h("div.menu", { role: "menu", hidden: true }, ...actions.map(([words, act]) => h("button", { type: "button", role: "menuitem", tabIndex: -1, onclick: () => { close(); act(); } }, words)));
  const button = iconButton(name, label, () => (list.hidden ? open() : close()), { ariaHasPopup: "menu", ariaExpanded: "false" });
  const items = [...list.children];
  const open = () => {
    list.hidden = false;
    button.ariaExpanded = "true";
    items[0].focus();
  };
  const close = () => {
    if (list.hidden) return;
    list.hidden = true;
    button.ariaExpanded = "false";
    button.focus();
  };
  const root = h("div.menu-place", {}, button, list);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
    else if (event.key !== "Escape" || list.hidden) return;
    else close();
    event.preventDefault();
    event.stopPropagation();
  });
  root.addEventListener("focusout", ({ relatedTarget }) => {
    if (root.contains(relatedTarget)) return;
    list.hidden = true;
    button.ariaExpanded = "false";
  });
  return root;
}

// A note at the lower edge for some seconds, perhaps with something to do about it.
export function note(words, action = null, act = null) {
  document.querySelector(".note")?.remove();
  const element = h("div.note", { role: "status" }, h("span", {}, words), ...(action ? [h("button", { onclick: () => { element.remove(); act(); } }, action)] : []));
  document.body.append(element);
  setTimeout(() => element.remove(), 8000);
}

// Offers a file to keep.
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
