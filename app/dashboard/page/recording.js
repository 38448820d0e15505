// The frames of the last simulation of this page, for Play: kept in memory only.
const MOST = 2000; // frames

export const recording = { frames: [] };

export function record(frame, isFirst) {
  if (isFirst) recording.frames = [];
  recording.frames.push(frame);
  if (recording.frames.length > MOST) recording.frames.shift();
}
