// Markdown to elements, never to HTML: what a model writes can show anything and do nothing. Links go out only when
// they are clicked, and only to http, https and mailto; pictures are links, so that nothing is loaded from elsewhere.
import { h } from "./dom.js";
import { highlight } from "./highlight.js";
import { filled, inline } from "./inline.js";
import { math } from "./math.js";
import { copyButton } from "./widgets.js";

// No pattern here can match a text in two ways, which would take time that grows with its square.
const DEEPEST = 16; // quotes and lists within each other; what is deeper is a paragraph
const FENCE = /^( *)(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;

export function markdown(text) {
  const fragment = document.createDocumentFragment();
  for (const [, make] of blocks(text.replaceAll("\r\n", "\n").split("\n"), 0)) fragment.append(make());
  return fragment;
}

// Markdown that grows: only the last block is made again, since no block before it can change any more.
export class Growing {
  constructor(place) {
    this.place = place;
    this.source = "";
    this.final = { length: 0, count: 0 }; // characters and elements that stay
  }

  update(text) {
    text = text.replaceAll("\r\n", "\n");
    if (!text.startsWith(this.source)) this.final = { length: 0, count: 0 };
    this.source = text;
    const lines = text.slice(this.final.length).split("\n");
    const { childNodes } = this.place;
    while (childNodes.length > this.final.count) this.place.lastChild.remove();
    const found = [...blocks(lines, 0)];
    for (const [, make] of found) this.place.append(make());
    // A block whose first line may still become something else can still belong to the one before it.
    let last = found.length - 1;
    if (last > 0 && found[last][0] === lines.length - 1) last--;
    if (last <= 0) return;
    for (const line of lines.slice(0, found[last][0])) this.final.length += line.length + 1;
    this.final.count += last;
  }
}

// Yields the blocks of a text, each as [its first line, what makes its element].
function* blocks(lines, depth) {
  let index = 0;
  while (index < lines.length) {
    const begin = index;
    const line = lines[index];
    let match;
    if (!line.trim()) {
      index++;
      continue;
    }
    if ((match = FENCE.exec(line))) {
      const [, indent, fence, info] = match;
      const isEnd = (each) => each.trim().startsWith(fence) && !each.trim().replaceAll(fence[0], "");
      for (index++; index < lines.length && !isEnd(lines[index]); ) index++;
      const code = lines.slice(begin + 1, index++).map((each) => unindented(each, indent.length)).join("\n");
      yield [begin, () => codeBlock(code, info.trim().split(/\s/)[0])];
    } else if ((match = HEADING.exec(line))) {
      const [, marks, words] = match;
      index++;
      yield [begin, () => filled(`h${Math.min(6, marks.length + 2)}`, inline(words.trimEnd().replace(/ #+$/, "")))];
    } else if (RULE.test(line)) {
      index++;
      yield [begin, () => h("hr")];
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      while (index < lines.length && QUOTE.test(lines[index])) index++;
      const quoted = lines.slice(begin, index).map((each) => each.replace(/^ *> ?/, ""));
      yield [begin, () => filled("blockquote", made(quoted, depth + 1))];
    } else if (startsList(line) && depth < DEEPEST) {
      index = endOfList(lines, begin);
      const items = lines.slice(begin, index);
      yield [begin, () => list(items, depth)];
    } else if (line.includes("|") && isTableRule(lines[begin + 1] ?? "") && cells(line).length === cells(lines[begin + 1]).length) {
      while (index < lines.length && lines[index].includes("|")) index++;
      if (index === begin + 1) index++; // its rule has no bar, if it has one column
      const rows = lines.slice(begin, index);
      yield [begin, () => table(rows)];
    } else if ((match = /^\s*(\$\$|\\\[)/.exec(line))) { // lines of a formula, or a paragraph
      const end = match[1] === "$$" ? "$$" : "\\]";
      const ends = (each) => each.trimEnd().endsWith(end) && (index > begin || each.trim().length > 3);
      while (index < lines.length && lines[index].trim() && !ends(lines[index])) index++;
      const isWhole = index < lines.length && ends(lines[index]);
      if (isWhole) index++;
      const source = lines.slice(begin, index).join("\n").trim();
      yield [begin, () => (isWhole && math(source.slice(2, -2), true)) || filled("p", inline(source))];
    } else {
      index = begin + 1;
      while (index < lines.length && lines[index].trim() && !startsBlock(lines[index], depth)) index++;
      const text = lines.slice(begin, index).map((each) => each.trimStart()).join("\n").trimEnd();
      yield [begin, () => filled("p", inline(text))];
    }
  }
}

function* made(lines, depth) {
  for (const [, make] of blocks(lines, depth)) yield make();
}

const startsList = (line) => ITEM.test(line) && /\S\s+\S/.test(line);

// Whether a line ends the paragraph before it. A number at its beginning may be part of a sentence, unless it is 1.
const startsBlock = (line, depth) => FENCE.test(line) || HEADING.test(line) || RULE.test(line)
  || (depth < DEEPEST && (QUOTE.test(line) || (startsList(line) && /^\s*(1[.)]|\D)/.test(line))));

const isTableRule = (line) => /^[\s:|-]+$/.test(line) && line.includes("-");

const indentOf = (line) => line.length - line.trimStart().length;

const unindented = (line, most) => line.slice(Math.min(most, indentOf(line)));

const isOrdered = (marker) => /\d/.test(marker);

function codeBlock(code, language) {
  const name = language.toLowerCase().replace(/[^\w+#.-]/g, "");
  return h("div.code", {},
    h("div.code-head", {}, h("span", {}, name || "text"), copyButton("Copy code", () => code)),
    h("pre", { tabIndex: 0 }, filled("code", highlight(code, name))));
}

// A list goes on over empty lines, if an item or text of an item follows; an item of the other kind begins another.
function endOfList(lines, begin) {
  const [, indent, marker] = ITEM.exec(lines[begin]);
  let index = begin + 1;
  while (index < lines.length) {
    let next = index;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next === lines.length) return index;
    const line = lines[next];
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) {
      if (isOrdered(item[2]) !== isOrdered(marker) || RULE.test(line)) return index;
    } else if (indentOf(line) <= indent.length && (next > index || startsBlock(line, 0))) return index;
    index = next + 1;
  }
  return index;
}

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  let [width, isCode, isLoose] = [0, false, false];
  for (const line of lines) {
    const item = isCode && indentOf(line) > indent.length ? null : ITEM.exec(line);
    isLoose ||= !isCode && !line.trim();
    isCode = /^\s*(```|~~~)/.test(line) ? !isCode : isCode && !item;
    if (item && item[1].length <= indent.length + 1) {
      width = item[3].length > 4 ? item[1].length + item[2].length + 1 : item[0].length;
      items.push([line.slice(width)]);
    } else items.at(-1).push(unindented(line, width));
  }
  const root = h(isOrdered(marker) ? "ol" : "ul");
  if (isOrdered(marker) && parseInt(marker) !== 1) root.start = parseInt(marker);
  for (const item of items) root.append(listItem(item, isLoose, depth));
  return root;
}

function listItem(lines, isLoose, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  const element = h(task ? "li.task" : "li");
  if (task) {
    const checked = task[1] !== " ";
    element.append(h("input", { type: "checkbox", disabled: true, checked, ariaLabel: checked ? "done" : "to do" }), " ");
    lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  }
  for (const block of made(lines, depth + 1)) {
    if (block.tagName === "P" && !isLoose) element.append(...(block.childNodes.length < 1000 ? block.childNodes : [block]));
    else element.append(block);
  }
  return element;
}

function table(lines) {
  const sides = cells(lines[1]).map((cell) => ["", "left", "right", "center"][cell.startsWith(":") + 2 * cell.endsWith(":")]);
  const row = (kind) => (line) => {
    const found = cells(line);
    // Cells that a row lacks are not made: a wide table with many empty rows would have the square of its text.
    return filled("tr", sides.slice(0, found.length).map((side, index) => filled(side ? `${kind}.${side}` : kind, inline(found[index]))));
  };
  const body = filled("tbody", lines.slice(2).map(row("td")));
  return h("div.table", { tabIndex: 0 }, h("table", {}, h("thead", {}, row("th")(lines[0])), body));
}

// The cells of a row: a bar within code, or after a backslash, is text.
function cells(line) {
  const found = [""];
  for (const [part] of line.trim().replace(/^\||\|$/g, "").matchAll(/\\\||`[^`|]*\|[^`]*`|[^|\\`]+|[^]/g)) {
    if (part === "|") found.push("");
    else found[found.length - 1] += part === "\\|" ? "|" : part;
  }
  return found.map((cell) => cell.trim());
}
