// The lanes: a column for each of the last steps, a lane for each running request; above them what each step took, below
// them when it was. Columns are equally wide however long a step took, so the time axis marks where the engine was idle.
import { BOTTOM, drawAxes, LEFT, roundUp, span, tick } from "./axes.js";
import { colours, fit, quantile, seconds } from "./dom.js";

const MOST_LANES = 48;
const GAP = 14; // pixels between the times of the steps and the lanes
const IDLE = 1; // seconds between two steps that are worth a mark

export class Lanes {
  // `select(id)` is called with the request that was clicked. `times` is how many pixels the step times have.
  constructor(canvas, select, times = 64) {
    this.canvas = canvas;
    this.times = times;
    this.cells = [];
    this.shown = null; // the steps that are drawn, and how
    this.pointed = null; // the step that the pointer was put on; it keeps its mark while the lanes move on
    this.onPoint = () => {};
    canvas.addEventListener("click", (event) => {
      const id = this.at(event);
      if (id) select(id);
    });
    canvas.addEventListener("mousemove", (event) => {
      canvas.style.cursor = this.at(event) ? "pointer" : "";
      const { steps, column } = this.shown ?? { steps: [], column: 1 };
      this.pointAt(steps[Math.floor((event.offsetX - LEFT) / column)] ?? null);
    });
    canvas.addEventListener("mouseleave", () => this.pointAt(null));
  }

  at({ offsetX, offsetY }) {
    return this.cells.find(({ x, y, w, h }) => offsetX >= x && offsetX < x + w && offsetY >= y && offsetY < y + h)?.id;
  }

  pointAt(step) {
    if (this.pointed === step) return;
    this.pointed = step;
    this.onPoint(step);
  }

  // Up to the step of index `end` of the history's steps.
  draw(history, end, selected) {
    const { canvas } = this;
    this.cells = [];
    const numLanes = Math.min(Math.max(history.lanes.length, Math.min(history.frame?.limits.max_num_seqs ?? 8, 8), 4), MOST_LANES);
    canvas.style.height = `${this.times + GAP + numLanes * Math.max(7, Math.min(18, 320 / numLanes)) + BOTTOM}px`;
    fit(canvas, (context, width, height) => {
      const colour = colours();
      const column = width > 700 ? 9 : 6;
      const count = Math.floor((width - LEFT - 4) / column);
      const steps = history.steps.slice(Math.max(0, end + 1 - count), end + 1);
      const lane = (height - BOTTOM - this.times - GAP) / numLanes;
      this.shown = { steps, column };
      this.drawTimes(context, steps, column, width, height, colour, history.frame?.limits.target_inter_token_latency);
      for (let index = 0; index < numLanes; index++) {
        context.fillStyle = colour.line;
        context.fillRect(LEFT, this.times + GAP + (index + 1) * lane - 0.5, width - LEFT, 0.5);
      }
      steps.forEach((step, index) => {
        const x = LEFT + index * column;
        if (step === this.pointed) {
          context.fillStyle = colour.line;
          context.fillRect(x - 1, 0, column + 1, height - BOTTOM);
        }
        for (const cell of step.lanes) {
          if (cell.lane === null || cell.lane >= MOST_LANES) continue;
          const y = this.times + GAP + cell.lane * lane;
          if (cell.left) {
            if (cell.left === "stop" || cell.left === "length") continue;
            context.fillStyle = cell.left === "preempted" ? colour.warn : colour.bad;
            context.fillRect(x + column - 3, y, 3, lane - 1);
            continue;
          }
          context.globalAlpha = selected && selected !== cell.id ? 0.35 : 1;
          context.fillStyle = step.outcome === "failed" ? colour.bad : cell.prefills ? colour.prefill : colour.decode;
          // A chunk is as high as its share of the budget, a decode a line of its own.
          const share = cell.prefills ? Math.max(0.45, Math.min(1, cell.tokens / step.budget)) : 0.45;
          const h = Math.max(3, (lane - 2) * share);
          context.fillRect(x, y + (lane - h) / 2, column - 1, h);
          context.globalAlpha = 1;
          this.cells.push({ x, y, w: column, h: lane, id: cell.id });
        }
      });
      const now = end === history.steps.length - 1 ? history.frame?.time : null;
      this.drawAges(context, steps, column, width, height, colour, now);
    });
    canvas.dataset.step = history.steps[end]?.step ?? 0;
  }

  drawTimes(context, steps, column, width, height, colour, target) {
    // The longest ones are cut, or there would be nothing to see of the others.
    const most = roundUp(Math.max((target ?? 0) * 1.25, 1.5 * (quantile(steps.map((step) => step.seconds).sort((a, b) => a - b), 0.95) ?? 0), 1e-3));
    const y = (value) => this.times - (value / most) * this.times;
    steps.forEach((step, index) => {
      const top = Math.min(this.times - 1, Math.max(0, y(step.seconds)));
      context.fillStyle = step === this.pointed ? colour.text : step.outcome === "done" ? colour.faint : colour.bad;
      context.globalAlpha = target && step.seconds <= target ? 0.5 : 1;
      context.fillRect(LEFT + index * column, top, column - 1, this.times - top);
    });
    context.globalAlpha = 1;
    drawAxes(context, colour, { height, width, ys: [...(target ? [[y(target), tick(target)]] : []), [0, tick(most)], [this.times - 4, "0"]] });
    if (!target) return;
    context.strokeStyle = colour.warn;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(LEFT, y(target));
    context.lineTo(width, y(target));
    context.stroke();
    context.setLineDash([]);
  }

  // How long ago steps began, counted from `now` or the last one, and where the engine was idle between two of them.
  drawAges(context, steps, column, width, height, colour, now) {
    if (!steps.length) return;
    const end = Math.max(now ?? 0, steps.at(-1).time + steps.at(-1).seconds);
    const idle = [];
    context.strokeStyle = colour.faint;
    context.setLineDash([2, 3]);
    steps.forEach((step, index) => {
      const before = steps[index - 1];
      const pause = before ? step.time - before.time - before.seconds : 0;
      if (pause < IDLE) return;
      const x = LEFT + index * column - 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - BOTTOM);
      context.stroke();
      idle.push([x, `idle ${span(pause)}`]);
    });
    context.setLineDash([]);
    const every = Math.ceil(110 / column);
    const ticks = [];
    for (let index = steps.length - 1; index >= 0; index -= every) ticks.push([LEFT + (index + 0.5) * column, `−${span(end - steps[index].time)}`.replace(/^−0 s$/, "now")]);
    drawAxes(context, colour, { height, width, xs: [...idle.reverse(), ...ticks] });
  }
}

// A step in a sentence. `before` is the step before it, if that is known.
export function explain(step, before, target) {
  const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
  const prefills = step.rows.filter(([, tokens, sampled]) => tokens > sampled);
  const decodes = step.rows.length - prefills.length;
  const tokens = prefills.reduce((sum, [, count]) => sum + count, 0);
  const work = [];
  if (prefills.length) work.push(`${many(tokens, "prompt token")} of ${many(prefills.length, "request")} (${step.budget.toLocaleString("en")} had room)`);
  if (decodes) work.push(`the next token of ${many(decodes, "request")}`);
  const against = target ? (step.seconds > target ? `, more than the ${seconds(target)} aimed at,` : ` of the ${seconds(target)} aimed at`) : "";
  const words = [`Step ${step.step.toLocaleString("en")} took ${seconds(step.seconds)}${against}`];
  words.push(work.length ? ` and computed ${work.join(" and ")}.` : " and computed nothing.");
  if (step.outcome !== "done") words.push(step.outcome === "failed" ? " It failed." : " It was abandoned, because all its requests were aborted.");
  const pause = before ? step.time - before.time - before.seconds : 0;
  if (pause >= IDLE) words.push(` Before it the engine was idle for ${span(pause)}.`);
  const ends = Map.groupBy(step.left, ([, why]) => why);
  const named = { stop: "ended", length: "reached its length limit", abort: "was aborted", error: "failed", timeout: "timed out", preempted: "was preempted" };
  const plural = { ...named, length: "reached their length limits", abort: "were aborted", preempted: "were preempted" };
  if (ends.size) words.push(` Since the step before, ${[...ends].map(([why, list]) => `${many(list.length, "request")} ${(list.length === 1 ? named : plural)[why] ?? why}`).join(", ")}.`);
  return words.join("");
}
