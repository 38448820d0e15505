// Conversations as files: JSON and Markdown, which `/save` and `/load` of `headrace chat` write and read too.
import { fresh, titleOf } from "./talks.js";

const ROLES = ["system", "user", "assistant"];
const HEADING = /^\\*## (?:user|assistant|system)\s*$/; // a line of a text that looks like one gets a backslash

export function toJson(talk) {
  return {
    headrace_conversation: 1, title: titleOf(talk), model: talk.model ?? null, created: talk.created, system: talk.system || null,
    messages: talk.messages.filter(({ content, tool_calls }) => content || tool_calls).map(({ role, content, reasoning, tool_calls, tool_call_id }) => ({
      role, content, ...(reasoning ? { reasoning } : {}), ...(tool_calls ? { tool_calls } : {}), ...(tool_call_id ? { tool_call_id } : {}),
    })),
  };
}

export function toMarkdown(talk) {
  const escaped = (text) => text.trim().split("\n").map((line) => (HEADING.test(line) ? `\\${line}` : line)).join("\n");
  const system = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  const parts = [...system, ...talk.messages].filter(({ role, content }) => ROLES.includes(role) && content);
  return [`# ${titleOf(talk)}`, ...parts.map(({ role, content }) => `## ${role}\n\n${escaped(content)}`)].join("\n\n") + "\n";
}

// The conversations of a file's text, of either form. Throws what is wrong, in words.
export function fromText(text) {
  const trimmed = text.replace(/^\ufeff/, "").trim();
  if (!/^[[{]/.test(trimmed)) return [fromMarkdown(trimmed)];
  let found;
  try {
    found = JSON.parse(trimmed);
  } catch (error) {
    throw new Error(`it is not JSON: ${error.message}`);
  }
  return (Array.isArray(found) && !found.every((each) => each?.role) ? found : [found]).map(fromJson);
}

function fromJson(given) {
  const messages = Array.isArray(given) ? given : given?.messages; // a bare list is one too
  if (!Array.isArray(messages)) throw new Error("it has no “messages”, so it is no conversation");
  if ((given.headrace_conversation ?? 1) !== 1) throw new Error(`it has the form ${given.headrace_conversation}, which is newer than this page`);
  if (!messages.length) throw new Error("it has no messages");
  const talk = fresh();
  for (const message of messages) {
    const content = textOf(message?.content);
    if (typeof message?.role !== "string" || content === null) throw new Error("a message has no role, or its content is no text");
    const { role, reasoning, tool_calls: made, tool_call_id: id } = message;
    const calls = Array.isArray(made) ? { tool_calls: made.filter(Boolean) } : {};
    if (!(calls.tool_calls ?? []).every(isCall)) throw new Error("a call of a tool has no name, or its arguments are no text");
    talk.messages.push({ role, content, ...(isText(reasoning) ? { reasoning } : {}), ...calls, ...(isText(id) ? { tool_call_id: id } : {}) });
  }
  return described(talk, given);
}

const isText = (value) => typeof value === "string" && value !== "";

const isCall = ({ function: called }) => typeof called?.name === "string" && typeof (called.arguments ?? "") === "string";

function textOf(content) {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? "").join("");
  return content === null || content === undefined ? "" : null;
}

function described(talk, { title, model, created, system }) {
  if (typeof title === "string") talk.title = title;
  if (typeof model === "string") talk.model = model;
  if (!Number.isNaN(Date.parse(created))) talk.created = created;
  if (typeof system === "string") talk.system = system;
  if (!talk.system && talk.messages[0]?.role === "system") talk.system = talk.messages.shift().content;
  return talk;
}

function fromMarkdown(text) {
  const talk = fresh();
  let title = null;
  let lines = [];
  for (const line of text.replaceAll("\r\n", "\n").split("\n")) {
    const [, role] = /^## (user|assistant|system)\s*$/.exec(line) ?? [];
    if (role) talk.messages.push({ role, content: (lines = []) });
    else if (!talk.messages.length) title ??= /^# (.*)/.exec(line)?.[1].trim();
    else lines.push(HEADING.test(line) ? line.slice(1) : line);
  }
  if (!talk.messages.length) throw new Error("it is neither JSON nor has headings “## user” and “## assistant”");
  for (const message of talk.messages) message.content = message.content.join("\n").trim();
  return described(talk, { title });
}

export const fileName = (talk) => titleOf(talk).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60).toLowerCase() || "conversation";
