// The way to the server: keys, errors in its own words, and streams of events.
// EventSource cannot send a key, so streams are read by fetch.

export const keys = {
  get: (kind) => sessionStorage.getItem(`key-${kind}`) ?? "",
  set: (kind, key) => (key ? sessionStorage.setItem(`key-${kind}`, key) : sessionStorage.removeItem(`key-${kind}`)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// `kind` is whose key is sent: "client" or "admin". Throws Refused.
export async function ask(path, { kind = "client", body, signal } = {}) {
  const headers = {};
  if (keys.get(kind)) headers.authorization = `Bearer ${keys.get(kind)}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  if (answer.status === 401) throw new Refused(401, wordsOf(kind));
  let message = `${answer.status} ${answer.statusText}`;
  try {
    const { error } = await answer.json();
    message = [error?.message, error].find((each) => each && typeof each === "string") ?? message;
  } catch { /* not in the server's words: a proxy, perhaps */ }
  throw new Refused(answer.status, message);
}

// A wrong key is another mistake than none.
function wordsOf(kind) {
  if (keys.get(kind)) return `The ${kind === "admin" ? "admin" : "API"} key that was entered is wrong: the server does not know it.`;
  return kind === "admin" ? "One of the server’s admin keys is needed." : "An API key is needed.";
}

// The events of an answer, as [name, data].
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) yield [name, data.join("\n")];
    }
  }
}
