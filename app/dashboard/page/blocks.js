// The KV blocks as a map: a cell for each, or for every few; free, cached, owned by the first group or another, shared.
import { colours, fit } from "./dom.js";

export function drawBlocks(canvas, blocks) {
  const count = blocks.map.length;
  const width = canvas.parentElement.clientWidth;
  const cell = Math.max(5, Math.min(12, Math.floor(Math.sqrt((width * 170) / count))));
  const perRow = Math.max(1, Math.floor(width / cell));
  canvas.style.height = `${Math.ceil(count / perRow) * cell}px`;
  fit(canvas, (context) => {
    const colour = colours();
    const groups = [colour.owned, colour.group2, colour.group3];
    [...blocks.map].forEach((state, index) => {
      const [x, y] = [(index % perRow) * cell, Math.floor(index / perRow) * cell];
      const lower = state.toLowerCase();
      context.fillStyle = state === "." ? colour.line : state === "-" ? colour.cached : groups[(lower.charCodeAt(0) - 97) % groups.length];
      context.fillRect(x, y, cell - 1, cell - 1);
      if (state !== lower) { // shared: a mark that needs no colour
        context.fillStyle = colour.shared;
        context.fillRect(x + cell / 4, y + cell / 4, cell / 2 - 1, cell / 2 - 1);
      }
    });
  });
}
