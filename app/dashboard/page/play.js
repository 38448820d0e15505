// Play: a recorded file of frames, opened here and sent nowhere.
import { h, seconds } from "./dom.js";
import { recording } from "./recording.js";
import { View } from "./view.js";

const MOST_BYTES = 512 * 2 ** 20;

export class Play {
  constructor(root) {
    this.frames = [];
    this.next = 0;
    this.file = h("input", { type: "file", accept: ".jsonl,.json,.ndjson,application/json", ariaLabel: "Recorded file", onclick: () => { this.file.value = ""; }, onchange: () => this.open(this.file.files[0]) });
    this.button = h("button.primary", { disabled: true, onclick: () => this.toggle() }, "Play");
    this.speed = h("select", { ariaLabel: "Speed" }, ...[0.25, 1, 4, 16].map((speed) => h("option", { value: speed, selected: speed === 1 }, `× ${speed}`)));
    this.place = h("input", { type: "range", min: 0, max: 0, value: 0, disabled: true, ariaLabel: "Time", oninput: () => this.seek(Number(this.place.value)) });
    this.time = h("span.where");
    this.notice = h("p.notice", { role: "status", hidden: true });
    this.last = h("button", { onclick: () => this.play(recording.frames.slice()) }, "Play the last simulation");
    this.drop = h("div.drop", {}, h("span", {}, "Drop a recorded file here, or choose one:"), this.file, this.last,
      h("span.faint", {}, h("code", {}, "headrace simulate --record FILE"), " writes such files. They stay in this browser."));
    this.body = h("div.view", { tabIndex: -1, hidden: true });
    this.controls = h("div.bar.controls", { hidden: true }, this.button, this.speed, this.place, this.time);
    root.append(this.drop, this.notice, this.controls, this.body);
    for (const [name, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      root.addEventListener(name, (event) => { event.preventDefault(); this.drop.classList.toggle("over", isOver); });
    }
    root.addEventListener("drop", (event) => this.open(event.dataTransfer.files[0]));
    this.view = new View(this.body);
  }

  enter() {
    const { frames } = recording;
    this.last.disabled = !frames.length;
    this.last.title = frames.length ? `${seconds(frames.at(-1).time - frames[0].time)} of virtual time` : "Run one under Simulate first.";
  }

  leave() { this.stop(); }

  async open(file) {
    if (!file) return;
    this.stop();
    try {
      if (file.size > MOST_BYTES) throw new Error("it has more than 512 MiB");
      const lines = (await file.text()).split("\n").filter((line) => line.trim());
      const frames = lines.map((line, index) => {
        try {
          return JSON.parse(line);
        } catch { throw new Error(`line ${index + 1} is not JSON`); }
      }).filter((each) => each.object === "frame");
      if (!frames.length) throw new Error("it has no frames");
      this.play(frames);
    } catch (error) {
      this.tell(`${file.name} cannot be played: ${error.message}.`);
    }
  }

  play(frames) {
    this.stop();
    this.frames = frames;
    this.tell("");
    this.body.hidden = this.controls.hidden = false;
    this.drop.classList.add("small");
    this.place.max = this.frames.length - 1;
    this.place.disabled = this.button.disabled = false;
    this.seek(Math.min(8, this.frames.length - 1));
    this.toggle();
  }

  // Frames tell of steps once, so whoever goes back begins some frames earlier.
  seek(index) {
    this.view.clear();
    for (let each = Math.max(0, index - 200); each <= index; each++) this.view.push(this.frames[each]);
    this.next = index + 1;
    this.show();
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.next >= this.frames.length) this.seek(0);
    this.button.textContent = "Stop";
    this.step();
  }

  step() {
    const frame = this.frames[this.next++];
    if (!frame) return this.stop();
    this.view.push(frame);
    this.show();
    const gap = (this.frames[this.next]?.time ?? frame.time) - frame.time;
    this.timer = setTimeout(() => this.step(), Math.min(1000, Math.max(0, gap * 1000) / Number(this.speed.value)));
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
  }

  show() {
    const [first, now, last] = [this.frames[0], this.frames[this.next - 1], this.frames.at(-1)];
    this.place.value = this.next - 1;
    this.time.textContent = `${seconds(now.time - first.time)} of ${seconds(last.time - first.time)}`;
  }

  tell(words) { this.notice.textContent = words; this.notice.hidden = !words; }
}
