// The chat's conversations, kept in this browser only: an entry for each, so that no tab overwrites another's.
const [PREFIX, SETTINGS, OLD] = ["headrace-talk-", "headrace-chat-settings", "headrace-chats"];

export const fresh = () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2), changed: 0, system: "", messages: [] });

export function load() {
  const store = { talks: [], settings: {}, model: undefined };
  try {
    takeOver();
    Object.assign(store, JSON.parse(localStorage.getItem(SETTINGS) ?? "{}"));
    store.talks = stored();
  } catch { /* the browser keeps nothing */ }
  return store;
}

export function saveTalk(talk) {
  talk.changed = Date.now();
  put(PREFIX + talk.id, talk);
}

export function saveSettings({ settings, model }) { put(SETTINGS, { settings, model }); }

export function forget(talk) {
  try {
    localStorage.removeItem(PREFIX + talk.id);
  } catch { /* the browser keeps nothing */ }
}

// Calls `take` with the id of a conversation that another tab has changed, and what it is now; null if it is gone.
export function onOtherTab(take) {
  addEventListener("storage", ({ key, newValue }) => {
    if (key?.startsWith(PREFIX)) take(key.slice(PREFIX.length), newValue === null ? null : parsed(newValue));
  });
}

// The latest first.
function stored() {
  const talks = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => parsed(localStorage.getItem(key)));
  return talks.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function parsed(text) {
  try {
    const talk = JSON.parse(text);
    return talk.id && Array.isArray(talk.messages) ? talk : null;
  } catch {
    return null;
  }
}

function put(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch { // full, unless the browser keeps nothing: the oldest goes
    try {
      const oldest = stored().reverse().find((talk) => PREFIX + talk.id !== key);
      if (!oldest) return;
      forget(oldest);
    } catch {
      return;
    }
    put(key, value);
  }
}

// They were one entry once.
function takeOver() {
  const text = localStorage.getItem(OLD);
  if (text === null) return;
  localStorage.removeItem(OLD);
  try {
    const { talks, settings, model } = JSON.parse(text);
    saveSettings({ settings: settings ?? {}, model });
    talks.reverse().forEach((talk, index) => {
      const taken = { ...fresh(), ...talk, changed: index + 1 };
      put(PREFIX + taken.id, taken);
    });
  } catch { /* it was none of ours */ }
}
