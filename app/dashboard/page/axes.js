// Scales: round numbers, lengths of time in words, and axes of canvases.

export const LEFT = 46; // pixels that the labels of a vertical axis take
export const BOTTOM = 16; // and those of a horizontal one

// The next round number, so that a scale does not end in 2.97.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 1.5, 2, 3, 4, 5, 6, 8].find((digit) => digit * power >= value * (1 - 1e-9)) ?? 10);
}

// Seconds at a scale, without needless zeros.
export const tick = (value) => (value < 0.0995 ? `${Number((1000 * value).toPrecision(2))} ms` : `${Number(value.toPrecision(3))} s`);

// A length of time as people say it: "25 s", "3 min", "2 h 5 min".
export function span(seconds) {
  if (seconds < 0.005) return "0 s";
  if (seconds < 9.95) return `${seconds < 0.995 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  const days = minutes < 2880 ? 0 : Math.floor(minutes / 1440);
  const [hours, rest] = [Math.floor(minutes / 60) - 24 * days, minutes % 60];
  const parts = days ? [[days, "d"], [hours, "h"]] : [[hours, "h"], [rest, "min"]];
  return parts.filter(([count]) => count).map(([count, unit]) => `${count} ${unit}`).join(" ") || "0 min";
}

function label(context, colour, words, x, y, align) {
  context.fillStyle = colour.faint;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = align;
  context.fillText(words, x, y);
}

// Labels at the left of a canvas, [[y, words], ...], and those below it, [[x, words], ...]. Labels that do not fit beside earlier ones are left out.
export function drawAxes(context, colour, { height, width, ys = [], xs = [] }) {
  const rows = [];
  for (const [at, words] of ys) {
    const y = Math.max(9, at + 4);
    if (rows.some((row) => Math.abs(row - y) < 11)) continue;
    rows.push(y);
    label(context, colour, words, LEFT - 6, y, "right");
  }
  const taken = [];
  for (const [x, words] of xs) {
    const half = 4 + words.length * 3;
    const middle = Math.min(Math.max(x, half), width - half);
    if (taken.some(([from, to]) => middle - half < to && middle + half > from)) continue;
    taken.push([middle - half, middle + half]);
    label(context, colour, words, middle, height - 3, "center");
  }
}
