// A line of Markdown to nodes: code, math, emphasis, links. Each character is looked at a bounded number of times: a
// beginning without an end costs no search of its own, so the time is linear in the text, whatever it is.
import { h } from "./dom.js";
import { math } from "./math.js";

const SPECIAL = /https?:\/\/|!\[|<br ?\/?>|&(?:amp|lt|gt|quot|nbsp|#39);|[`*_~$[\]\\\n]/g;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^\n]{0,300}?["'])?\s*\)/y;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\u00a0", "&#39;": "'" };
const MOST_OPEN = 100; // delimiters that wait for their end; elements are nested no deeper
const MOST_MATH = 1000; // characters

export function inline(text) {
  const special = new RegExp(SPECIAL); // with a place of its own
  const ends = new Ends(text);
  const out = []; // nodes and strings
  const open = []; // delimiters of emphasis that wait for their end: { char, count, length, closes, at: index in out }
  const brackets = []; // where links may begin: { at, end: in text }
  let begin = 0;
  const push = (part, from, to) => {
    if (from > begin) out.push(text.slice(begin, from));
    if (part !== null) out.push(part);
    begin = special.lastIndex = to;
  };
  for (let match; (match = special.exec(text)); ) {
    const [found] = match;
    const at = match.index;
    const after = at + found.length;
    if (found === "`") {
      const length = runLength(text, at);
      const close = ends.backticks(length, at + length);
      if (close < 0) push(text.slice(at, at + length), at, at + length);
      else push(h("code", {}, text.slice(at + length, close).trim().replaceAll("\n", " ")), at, close + length);
    } else if (found === "\\") {
      const next = text[after] ?? "";
      const close = next === "(" || next === "[" ? ends.of(next === "(" ? "\\)" : "\\]", after + 1) : -1;
      if (close >= 0) push(formula(text.slice(after + 1, close), next === "[", text.slice(at, close + 2)), at, close + 2);
      else if (next === "\n") push(h("br"), at, after + 1);
      else if (/[!-/:-@[-`{-~]/.test(next)) push(next, at, after + 1);
      else special.lastIndex = after;
    } else if (found === "$") {
      const mark = text[after] === "$" ? "$$" : "$";
      const from = at + mark.length;
      const close = mark === "$$" ? ends.of("$$", from) : /\s/.test(text[from] ?? " ") ? -1 : ends.dollar(from + 1);
      const end = close + mark.length;
      if (close < 0) push(mark, at, from);
      else push(formula(text.slice(from, close), mark === "$$", text.slice(at, end)), at, end);
    } else if (found === "*" || found === "_" || found === "~") emphasis(text, at, out, open, brackets, push);
    else if (found === "[" || found === "![") {
      push(null, at, at);
      brackets.push({ at: out.length });
      push(found, at, after);
    } else if (found === "]") {
      const bracket = brackets.pop();
      TARGET.lastIndex = after;
      const target = bracket && text[after] === "(" ? TARGET.exec(text) : null;
      if (!target || !isSafe(target[1])) push("]", at, after);
      else {
        push(null, at, TARGET.lastIndex);
        while (open.length && open.at(-1).at >= bracket.at) open.pop();
        const [, ...words] = out.splice(bracket.at);
        out.push(link(target[1], words));
        brackets.length = 0; // no link within a link
      }
    } else if (found === "\n" || found[0] === "<") push(h("br"), at, after);
    else if (found[0] === "&") push(ENTITIES[found], at, after);
    else {
      const address = addressAt(text, at);
      if (address.length > found.length) push(link(address, [address]), at, at + address.length);
    }
  }
  push(null, text.length, text.length);
  return out;
}

// A run of delimiters closes what it can, and opens what is left of it.
function emphasis(text, at, out, open, brackets, push) {
  const char = text[at];
  const length = runLength(text, at);
  const [before, after] = [text[at - 1] ?? " ", text[at + length] ?? " "];
  const [opens, closes] = flanks(char, before, after);
  push(null, at, at);
  let count = char === "~" && length !== 2 ? 0 : length;
  const isOurs = (each) => each.char === char && !((each.closes || opens) && (each.length + length) % 3 === 0 && (each.length % 3 || length % 3));
  while (closes && count) {
    const index = open.findLastIndex(isOurs);
    if (index < 0) break;
    const opener = open[index];
    const used = opener.count >= 2 && count >= 2 ? 2 : 1;
    const inner = out.splice(opener.at + 1);
    opener.count -= used;
    open.length = index + (opener.count ? 1 : 0);
    while (brackets.length && brackets.at(-1).at > opener.at) brackets.pop();
    if (opener.count) out[opener.at] = char.repeat(opener.count);
    else out.pop();
    out.push(filled(char === "~" ? "s" : used === 2 ? "strong" : "em", inner));
    count -= used;
  }
  if (count && opens) {
    if (open.length === MOST_OPEN) open.shift();
    open.push({ char, count, length, closes, at: out.length });
  }
  const left = char === "~" && length !== 2 ? length : count;
  push(left ? char.repeat(left) : null, at, at + length);
}

// CommonMark's rules: whether a run of delimiters can open and close emphasis, by what stands on both sides.
function flanks(char, before, after) {
  const [isSpace, isMark] = [/\s/, /[\p{P}\p{S}]/u];
  const left = !isSpace.test(after) && (!isMark.test(after) || isSpace.test(before) || isMark.test(before));
  const right = !isSpace.test(before) && (!isMark.test(before) || isSpace.test(after) || isMark.test(after));
  return char === "_" ? [left && (!right || isMark.test(before)), right && (!left || isMark.test(after))] : [left, right];
}

// Where the things end that may begin in a text, each kind found by one pass over it.
class Ends {
  constructor(text) {
    this.text = text;
  }

  // The next run of just so many backticks. Positions are asked for in rising order.
  backticks(length, from) {
    if (!this.runs) {
      this.runs = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.runs.has(run.length)) this.runs.set(run.length, []);
        this.runs.get(run.length).push(index);
      }
      for (const places of this.runs.values()) places.reverse();
    }
    return next(this.runs.get(length) ?? [], from);
  }

  // The next $ that can end a formula: text before it, and no digit after it, which would be a price.
  dollar(from) {
    this.dollars ??= [...this.text.matchAll(/(?<=[^\s\\])\$(?!\d)/g)].map(({ index }) => index).reverse();
    const found = next(this.dollars, from);
    return found - from > MOST_MATH ? -1 : found;
  }

  of(mark, from) {
    const found = this.text.slice(from, from + MOST_MATH).indexOf(mark);
    return found > 0 ? from + found : -1;
  }
}

function next(places, from) {
  while (places.length && places.at(-1) < from) places.pop();
  return places.at(-1) ?? -1;
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

const ADDRESS = /[^\s<>"`*|\\]+/y;

// An address in the text, without the marks that end its sentence, and without a bracket that was opened before it.
function addressAt(text, at) {
  ADDRESS.lastIndex = at;
  const [found] = ADDRESS.exec(text);
  let [end, opened] = [found.length, 0];
  for (const char of found) opened += char === "(" ? 1 : char === ")" ? -1 : 0;
  for (; end; end--) {
    const char = found[end - 1];
    if (char === ")" && opened < 0) opened++;
    else if (!/[.,;:!?'\]]/.test(char)) break;
  }
  return found.slice(0, end);
}

const isSafe = (target) => /^(https?:|mailto:)/i.test(target);

function link(target, words) {
  const element = filled("a", words.length ? words : [target], { href: target, target: "_blank", rel: "noopener noreferrer" });
  for (const inner of element.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return element;
}

function formula(tex, isShown, source) {
  return math(tex, isShown) ?? h("code.tex", {}, source);
}

// `h` takes its children as arguments, of which there is a most. Strings next to each other become one.
export function filled(kind, children, attributes = {}) {
  const element = h(kind, attributes);
  let text = "";
  for (const each of children) {
    if (typeof each === "string") text += each;
    else {
      if (text) element.append(text);
      text = "";
      element.append(each);
    }
  }
  if (text) element.append(text);
  return element;
}
