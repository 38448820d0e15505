// Markdown to elements, never to HTML: what a model writes can show anything and do nothing. Links go out only when
// they are clicked, and only to http, https and mailto; pictures are links, so that nothing is loaded from elsewhere.
import { h } from "./dom.js";

// Nothing that opens looks further than so many characters for its end, so the time is linear in the text.
const INLINE = /(`+)|\*\*([^]{1,2000}?)\*\*|__([^]{1,2000}?)__|\*([^\s*][^*]{0,2000}?)\*|~~([^]{1,2000}?)~~|!?\[([^\]]{0,500})\]\(([^\s)]{1,2000})[^)]{0,500}\)|(https?:\/\/[^\s<>()]{1,2000}[^\s<>().,;:!?'"])|\\([\\`*_~[\]()#+.!>-])/;

export function markdown(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const fragment = document.createDocumentFragment();
  let index = 0;
  const take = (test) => {
    const begin = index;
    while (index < lines.length && test(lines[index], index - begin)) index++;
    return lines.slice(begin, index);
  };
  while (index < lines.length) {
    const line = lines[index];
    let match;
    if (!line.trim()) index++;
    else if ((match = /^\s*(```+|~~~+)\s*([\w+-]*)/.exec(line))) {
      index++;
      const code = take((each) => !each.trim().startsWith(match[1]));
      index++;
      fragment.append(h("pre", {}, h("code", {}, code.join("\n"))));
    } else if ((match = /^(#{1,6})\s+(.*)/.exec(line))) {
      index++;
      fragment.append(h(`h${Math.min(6, match[1].length + 2)}`, {}, ...inline(match[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      index++;
      fragment.append(h("hr"));
    } else if (/^\s*>/.test(line)) {
      const quoted = take((each) => /^\s*>/.test(each)).map((each) => each.replace(/^\s*> ?/, ""));
      fragment.append(h("blockquote", {}, markdown(quoted.join("\n"))));
    } else if (isItem(line)) fragment.append(list(take((each) => isItem(each) || /^\s+\S/.test(each))));
    else if (line.includes("|") && isRule(lines[index + 1] ?? "")) fragment.append(table(take((each) => each.includes("|"))));
    else fragment.append(h("p", {}, ...inline(take((each, count) => each.trim() && (!count || !(isItem(each) || /^\s*(```|~~~|>|#{1,6}\s)/.test(each)))).join("\n"))));
  }
  return fragment;
}

const isItem = (line) => /^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line);

const isRule = (line) => /^[\s:|-]+$/.test(line) && line.includes("|") && line.includes("-"); // of a table

function list(lines) {
  const root = h(/^\s*\d/.test(lines[0]) ? "ol" : "ul");
  const indent = /^\s*/.exec(lines[0])[0].length;
  const items = [];
  for (const line of lines) {
    if (isItem(line) && /^\s*/.exec(line)[0].length <= indent + 1) items.push([line.replace(/^\s*([-*+]|\d+[.)])\s+/, "")]);
    else items.at(-1).push(line.trim() && isItem(line) ? line.slice(indent + 2) : line.trim());
  }
  for (const [first, ...rest] of items) root.append(h("li", {}, ...inline(first), ...(rest.length ? [markdown(rest.join("\n"))] : [])));
  return root;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (kind) => (line) => h("tr", {}, ...cells(line).map((cell) => h(kind, {}, ...inline(cell))));
  return h("table", {}, h("thead", {}, row("th")(lines[0])), h("tbody", {}, ...lines.slice(2).map(row("td"))));
}

function inline(text) {
  const parts = [];
  const unclosed = new Set(); // lengths of runs of backticks that no other run closes any more
  const search = new RegExp(INLINE, "g"); // with a place of its own: what is inside is searched meanwhile
  let begin = 0;
  for (let match; (match = search.exec(text)); ) {
    const [whole, ticks, strong, strong2, emphasis, struck, words, target, address, escaped] = match;
    let end = match.index + whole.length;
    let part;
    if (ticks) {
      const close = unclosed.has(ticks.length) ? -1 : closing(text, end, ticks.length);
      if (close < 0) {
        unclosed.add(ticks.length);
        continue;
      }
      part = h("code", {}, text.slice(end, close).trim());
      end = close + ticks.length;
    } else if (strong ?? strong2) part = h("strong", {}, ...inline(strong ?? strong2));
    else if (emphasis) part = h("em", {}, ...inline(emphasis));
    else if (struck) part = h("s", {}, ...inline(struck));
    else part = escaped || link(target ?? address, words ?? address, whole);
    if (match.index > begin) parts.push(text.slice(begin, match.index));
    parts.push(part);
    begin = search.lastIndex = end;
  }
  if (begin < text.length) parts.push(text.slice(begin));
  return parts;
}

// Where the next run of just so many backticks is; -1 if there is none.
function closing(text, from, length) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let run; (run = runs.exec(text)); ) if (run[0].length === length) return run.index;
  return -1;
}

function link(target, words, whole) {
  if (!/^(https?:|mailto:)/i.test(target)) return whole;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, words || target);
}
