// The chat's conversations, kept in this browser only: an entry for each, so that no tab overwrites another's.
//
// A conversation is { id, created, changed, title, system, model, messages }. A message is { role, content } and, if it is
// an answer, what is known of it: reasoning, tool_calls, model, facts, timeline, warning, error, end. The first message
// of a tail that has other versions holds them: `versions`, in which the shown one, `version`, is null.
const [PREFIX, SETTINGS, OLD] = ["headrace-talk-", "headrace-chat-settings", "headrace-chats"];

let latest = 0; // the highest `changed` of this page, so that conversations keep the order in which they were saved

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2);

export const fresh = () => ({ id: newId(), created: new Date().toISOString(), changed: 0, title: "", system: "", model: null, messages: [] });

export function titleOf(talk) {
  const first = talk.messages.find(({ role }) => role === "user")?.content.trim().split("\n")[0] ?? "";
  return talk.title || (first.length > 60 ? `${first.slice(0, 59).trimEnd()}…` : first) || "New conversation";
}

export function load() {
  const store = { talks: [], settings: {}, model: undefined };
  try {
    takeOver();
    Object.assign(store, JSON.parse(localStorage.getItem(SETTINGS) ?? "{}"));
    store.talks = stored();
  } catch { /* the browser keeps nothing */ }
  return store;
}

// Keeps a conversation. If another tab has written something else into its entry, ours becomes a copy under a name of
// its own. Returns { other, isFull }: the conversation of the other tab in that case, and whether there was no room.
export function saveTalk(talk) {
  const kept = read(PREFIX + talk.id);
  let other = null;
  if (kept && kept.changed !== talk.changed) {
    if (grewFrom(kept, talk)) Object.assign(talk, { title: kept.title, system: kept.system });
    else {
      other = kept;
      Object.assign(talk, { title: `${titleOf(talk)} (copy)`, id: newId() });
    }
  }
  latest = talk.changed = Math.max(Date.now(), Math.ceil(latest)) + Math.random(); // no two tabs write the same
  const isFull = !put(PREFIX + talk.id, talk);
  if (isFull && kept) talk.changed = kept.changed; // which stays there, and is no other tab's
  return { other, isFull };
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

// Puts `message` at `index`. What stood there, and all that followed, becomes another version of it.
export function branch(talk, index, message) {
  const tail = talk.messages.splice(index);
  const { versions, version } = putAway(tail);
  versions[version] = tail;
  talk.messages.push(Object.assign(message, { versions: [...versions, null], version: versions.length }));
}

// Puts `message` in the place of the last one, which is worth nothing, such as an error without text.
export function replaceLast(talk, message) {
  const { versions, version } = talk.messages.pop();
  talk.messages.push(versions ? Object.assign(message, { versions, version }) : message);
}

// Shows another version of the message at `index`, with all that followed it.
export function choose(talk, index, version) {
  const tail = talk.messages.splice(index);
  const { versions, version: before } = putAway(tail);
  const taken = versions[version];
  versions[before] = tail;
  versions[version] = null;
  Object.assign(taken[0], { versions, version });
  talk.messages.push(...taken);
}

function putAway(tail) {
  const { versions = [null], version = 0 } = tail[0];
  delete tail[0].versions;
  delete tail[0].version;
  return { versions, version };
}

// Whether what is kept is an earlier state of ours, though its title may be newer.
function grewFrom(kept, talk) {
  const last = kept.messages.length - 1;
  return last < talk.messages.length && kept.messages.every(({ role, content, versions }, index) => {
    const ours = talk.messages[index];
    if (role !== ours.role || (versions?.length ?? 0) > (ours.versions?.length ?? 0)) return false;
    return index === last ? ours.content.startsWith(content) : ours.content === content;
  });
}

// The latest first.
function stored() {
  const talks = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map(read);
  return talks.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function read(key) {
  try {
    return parsed(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function parsed(text) {
  try {
    const talk = JSON.parse(text);
    return talk.id && talk.messages.every(({ role, content }) => typeof role === "string" && typeof content === "string") ? { ...fresh(), ...talk } : null;
  } catch {
    return null;
  }
}

// Returns whether there was room. A browser that keeps nothing at all has no room either.
function put(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// They were one entry once. They leave it one by one, since there is not room for all of them twice.
function takeOver() {
  const text = localStorage.getItem(OLD);
  if (text === null) return;
  let old;
  try {
    old = JSON.parse(text);
    if (!Array.isArray(old.talks)) throw new TypeError("not a list");
  } catch { // it was none of ours
    localStorage.removeItem(OLD);
    return;
  }
  saveSettings({ settings: old.settings ?? {}, model: old.model });
  for (let changed = 1; old.talks.length; changed++) {
    const taken = { ...fresh(), ...old.talks.at(-1), changed };
    if (!Array.isArray(taken.messages)) taken.messages = [];
    old.talks.pop();
    localStorage.setItem(OLD, JSON.stringify(old));
    if (put(PREFIX + taken.id, taken)) continue;
    old.talks.push(taken);
    localStorage.setItem(OLD, JSON.stringify(old));
    return;
  }
  localStorage.removeItem(OLD);
}
