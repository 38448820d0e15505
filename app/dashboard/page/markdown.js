// Markdown to elements, never to HTML: what a model writes can show anything and do nothing. Links go out only when
// they are clicked, and only to http, https and mailto; pictures are links, so that nothing is loaded from elsewhere.
import { h } from "./dom.js";

const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*([^]+?)\*\*|__([^]+?)__|\*([^\s*][^*]*?)\*|~~([^]+?)~~|!?\[([^\]]*)\]\(([^\s)]+)[^)]*\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\\([\\`*_~[\]()#+.!>-])/;

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
    else if (line.includes("|") && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[index + 1] ?? "")) fragment.append(table(take((each) => each.includes("|"))));
    else fragment.append(h("p", {}, ...inline(take((each, count) => each.trim() && (!count || !(isItem(each) || /^\s*(```|~~~|>|#{1,6}\s)/.test(each)))).join("\n"))));
  }
  return fragment;
}

const isItem = (line) => /^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line);

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
  let match;
  while ((match = INLINE.exec(text))) {
    if (match.index) parts.push(text.slice(0, match.index));
    const [whole, ticks, code, strong, strong2, emphasis, struck, words, target, address, escaped] = match;
    if (ticks) parts.push(h("code", {}, code.trim()));
    else if (strong ?? strong2) parts.push(h("strong", {}, ...inline(strong ?? strong2)));
    else if (emphasis) parts.push(h("em", {}, ...inline(emphasis)));
    else if (struck) parts.push(h("s", {}, ...inline(struck)));
    else if (escaped) parts.push(escaped);
    else parts.push(link(target ?? address, words ?? address, whole));
    text = text.slice(match.index + whole.length);
  }
  if (text) parts.push(text);
  return parts;
}

function link(target, words, whole) {
  if (!/^(https?:|mailto:)/i.test(target)) return whole;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, words || target);
}
