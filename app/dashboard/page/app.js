// The tabs, and the keys for this tab of the browser.
import { keys } from "./server.js";
import { Live } from "./live.js";
import { Chat } from "./chat.js";
import { Simulate } from "./simulate.js";
import { Play } from "./play.js";
import { icon } from "./widgets.js";

const makers = { chat: Chat, live: Live, simulate: Simulate, play: Play };
const pages = {};
const tabs = [...document.querySelectorAll("[role=tab]")];
let shown = null;

function show(name) {
  if (!(name in makers)) name = "chat";
  if (shown === name) return;
  if (shown) pages[shown].leave?.();
  shown = name;
  for (const tab of tabs) {
    const isShown = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
    document.getElementById(tab.dataset.tab).hidden = !isShown;
  }
  pages[name] ??= new makers[name](document.getElementById(name));
  pages[name].enter?.();
}

for (const tab of tabs) {
  tab.setAttribute("aria-controls", tab.dataset.tab);
  tab.addEventListener("click", () => { location.hash = tab.dataset.tab; });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
addEventListener("hashchange", () => show(location.hash.slice(1)));
show(location.hash.slice(1));

const THEMES = ["system", "light", "dark"];
const themeButton = document.getElementById("theme-button");

function drawTheme() {
  const { chosen } = window.theme;
  themeButton.replaceChildren(icon(chosen));
  themeButton.title = themeButton.ariaLabel = `Theme: ${chosen}`;
}

themeButton.addEventListener("click", () => window.theme.choose(THEMES[(THEMES.indexOf(window.theme.chosen) + 1) % THEMES.length]));
addEventListener("theme-changed", drawTheme);
drawTheme();

const dialog = document.getElementById("keys-dialog");
const fields = { client: document.getElementById("client-key"), admin: document.getElementById("admin-key") };

function askForKeys() {
  for (const kind in fields) fields[kind].value = keys.get(kind);
  if (!dialog.open) dialog.showModal();
}

document.getElementById("keys-button").addEventListener("click", askForKeys);
addEventListener("key-wanted", askForKeys);
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "save") return;
  for (const kind in fields) keys.set(kind, fields[kind].value.trim());
  pages[shown].leave?.();
  pages[shown].enter?.();
});
