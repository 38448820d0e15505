// One answer as it comes: the request's body, the stream, and what is known of it in the end.
import { number, seconds } from "./dom.js";
import { ask, events, Refused } from "./server.js";

const SAVED_EVERY = 2000; // milliseconds

// What is sent of a conversation. Errors without an answer leave questions that follow each other: they become one,
// since many templates take turns only.
export function sent(talk, messages) {
  const out = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  messages.forEach(({ role, content, tool_calls, tool_call_id }, index) => {
    const calls = tool_calls && messages[index + 1]?.role === "tool" ? { tool_calls } : {};
    if (!content && !calls.tool_calls && role !== "tool") return;
    const before = out.at(-1);
    if (role === "user" && before?.role === "user") before.content += `\n\n${content}`;
    else out.push({ role, content, ...calls, ...(tool_call_id ? { tool_call_id } : {}) });
  });
  return out;
}

export class Run {
  // `changed` is called whenever there is more of the answer, `save` now and then.
  constructor(answer, { changed, save }) {
    this.answer = answer;
    this.changed = changed;
    this.save = save;
    this.saved = performance.now();
    this.controller = new AbortController();
  }

  stop() { this.controller.abort(); }

  async read(body) {
    const { answer } = this;
    const began = performance.now();
    Object.assign(answer, { facts: [], error: null, warning: null, timeline: null });
    answer.end = "stopped"; // is kept so if the page is closed meanwhile
    try {
      await this.follow(body, began);
    } catch (error) {
      if (error.name === "AbortError") answer.end = "stopped";
      else {
        answer.end = "failed";
        answer.error = { status: error.status ?? 0, words: error instanceof Refused ? error.message : `The connection to the server broke: ${error.message}.` };
      }
    }
  }

  async follow(body, began) {
    const { answer } = this;
    const response = await ask("v1/chat/completions", { body, signal: this.controller.signal });
    answer.warning = response.headers.get("x-headrace-warning");
    let [first, last, usage, reason] = [null, began, null, null];
    try {
      for await (const [, data] of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(chunk.error.code ?? 500, chunk.error.message ?? String(chunk.error));
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        reason = choice?.finish_reason ?? reason;
        if (!this.take(choice?.delta ?? {})) continue;
        last = performance.now();
        first ??= last;
        this.changed();
        if (last - this.saved > SAVED_EVERY) {
          this.saved = last;
          this.save();
        }
      }
      if (!reason) throw new Refused(0, "The answer ended too early: the server closed the stream in the middle of it.");
    } finally {
      if (first) answer.facts.push(`first token ${seconds((first - began) / 1000)}`);
    }
    answer.end = reason;
    if (usage) {
      const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
      if (last > first && count > 20) answer.facts.unshift(`${number((count - 1) / ((last - first) / 1000))} tok/s`);
      answer.facts.push(`${count} ${count === 1 ? "token" : "tokens"}`, `prompt ${prompt}, ${details?.cached_tokens ?? 0} cached`);
      answer.used = prompt + count;
    }
    answer.timeline = await timeline(response.headers.get("x-request-id"));
  }

  // Adds a piece of the stream to the answer; false if there is nothing in it.
  take(delta) {
    const { answer } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (!delta.content && !reasoning && !delta.tool_calls) return false;
    answer.content += delta.content ?? "";
    answer.reasoning = (answer.reasoning ?? "") + (reasoning ?? "");
    for (const { index, id, function: called } of delta.tool_calls ?? []) {
      answer.tool_calls ??= [];
      const call = (answer.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.id ??= id;
      call.function.name += called?.name ?? "";
      call.function.arguments += called?.arguments ?? "";
    }
    return true;
  }
}

// The server keeps it a moment after the last byte is out.
async function timeline(id) {
  for (const wait of [50, 250, 1000]) {
    await new Promise((done) => setTimeout(done, wait));
    try {
      return (await (await ask(`v1/requests/${encodeURIComponent(id)}/timeline`)).json()).segments;
    } catch { /* not there yet, or not kept */ }
  }
  return null;
}
