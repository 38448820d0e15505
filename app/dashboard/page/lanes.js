// The lanes: a column for each of the last steps, a lane for each running request; above them what each step took.
import { colours, fit, quantile } from "./dom.js";

const MOST_LANES = 48;

export class Lanes {
  // `select(id)` is called with the request that was clicked. `times` is how many pixels the step times have.
  constructor(canvas, select, times = 64) {
    this.canvas = canvas;
    this.times = times;
    this.cells = [];
    canvas.addEventListener("click", (event) => {
      const id = this.at(event);
      if (id) select(id);
    });
    canvas.addEventListener("mousemove", (event) => { canvas.style.cursor = this.at(event) ? "pointer" : ""; });
  }

  at({ offsetX, offsetY }) {
    return this.cells.find(({ x, y, w, h }) => offsetX >= x && offsetX < x + w && offsetY >= y && offsetY < y + h)?.id;
  }

  // Up to the step of index `end` of the history's steps.
  draw(history, end, selected) {
    const { canvas } = this;
    this.cells = [];
    const numLanes = Math.min(Math.max(history.lanes.length, Math.min(history.frame?.limits.max_num_seqs ?? 8, 8), 4), MOST_LANES);
    canvas.style.height = `${this.times + 14 + numLanes * Math.max(7, Math.min(18, 320 / numLanes))}px`;
    fit(canvas, (context, width, height) => {
      const colour = colours();
      const column = width > 700 ? 9 : 6;
      const count = Math.floor((width - 4) / column);
      const steps = history.steps.slice(Math.max(0, end + 1 - count), end + 1);
      const lane = (height - this.times - 14) / numLanes;
      this.drawTimes(context, steps, column, width, colour, history.frame?.limits.target_inter_token_latency);
      for (let index = 0; index < numLanes; index++) {
        context.fillStyle = colour.line;
        context.fillRect(0, this.times + 14 + (index + 1) * lane - 0.5, width, 0.5);
      }
      steps.forEach((step, index) => {
        const x = 2 + index * column;
        for (const cell of step.lanes) {
          if (cell.lane === null || cell.lane >= MOST_LANES) continue;
          const y = this.times + 14 + cell.lane * lane;
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
    });
    canvas.dataset.step = history.steps[end]?.step ?? 0;
  }

  drawTimes(context, steps, column, width, colour, target) {
    // The longest ones are cut, or there would be nothing to see of the others.
    const most = Math.max((target ?? 0) * 1.25, 1.5 * (quantile(steps.map((step) => step.seconds).sort((a, b) => a - b), 0.95) ?? 0), 1e-6);
    steps.forEach((step, index) => {
      const h = Math.max(1, Math.min(1, step.seconds / most) * this.times);
      context.fillStyle = step.outcome === "done" ? colour.faint : colour.bad;
      context.globalAlpha = target && step.seconds <= target ? 0.5 : 1;
      context.fillRect(2 + index * column, this.times - h, column - 1, h);
    });
    context.globalAlpha = 1;
    if (!target) return;
    const y = this.times - (target / most) * this.times;
    context.strokeStyle = colour.warn;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
  }
}
