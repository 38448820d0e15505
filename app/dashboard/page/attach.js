// Files in a message: the text of a file that is dropped, pasted or chosen goes into it, as code with the file's name.
import { h } from "./dom.js";
import { iconButton, note } from "./widgets.js";

const MOST = 2 ** 20; // bytes of one file

export class Attachments {
  // Files come by a button, or by `place`, onto which they are dropped and pasted; `take` gets the text of each.
  constructor(place, take) {
    this.take = take;
    this.file = h("input", { type: "file", multiple: true, hidden: true, ariaLabel: "Files for the message", onchange: () => this.add([...this.file.files]) });
    this.button = iconButton("attach", "Attach text files", () => this.file.click());
    const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
    const mark = (isOver) => place.classList.toggle("is-target", isOver);
    place.addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); mark(true); } });
    place.addEventListener("dragleave", ({ relatedTarget }) => { if (!place.contains(relatedTarget)) mark(false); });
    place.addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    place.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      // The cells of a spreadsheet are a text and its picture.
      if (!files.length || (files.every(isImage) && event.clipboardData.getData("text/plain"))) return;
      event.preventDefault();
      this.add(files);
    });
  }

  async add(files) {
    this.file.value = "";
    for (const file of files) {
      const { text, wrong } = await read(file);
      if (wrong) note(`${file.name || "The file"} was not attached: ${wrong}.`);
      else this.take(fenced(file.name, text));
    }
  }
}

const isImage = ({ type }) => type.startsWith("image/");

async function read(file) {
  if (isImage(file)) return { wrong: "it is an image, and this model reads text only" };
  if (file.size > MOST) return { wrong: `it has ${(file.size / MOST).toFixed(1)} MiB, and 1 MiB of text is allowed` };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? { wrong: "it is no text" } : { text };
  } catch {
    return { wrong: "it is no text in UTF-8" };
  }
}

// The fence is longer than any in the text. The name stands before it, since the word after a fence is a language.
function fenced(name, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([a-z0-9]{1,8})$/i.exec(name)?.[1].toLowerCase() ?? "";
  return `${name.replace(/[\r\n`]/g, " ")}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}
