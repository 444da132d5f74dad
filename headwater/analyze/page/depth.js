// Depth: every residual shows its last recorded step up to the chosen one.

const deep = groups.filter((group) => group.depth);
const steps = [...new Map(deep.flatMap((group) => group.depth.frames.map((frame) => [frame.step, frame]))).values()].sort((a, b) => a.step - b.step);
const frameAt = (group, step) => group.depth.frames.findLast((frame) => frame.step <= step) || group.depth.frames[0];
const frameOf = (group) => frameAt(group, state.step);
const kinds = [...new Set(deep.flatMap((group) => group.depth.kinds))];
const hollow = (kind) => (kinds.indexOf(kind) > 0 ? " hollow" : "");
const readName = (group, read) => (read < group.depth.kinds.length ? `Read ${read}, before ${group.depth.kinds[read]}` : "Final read");
const sourceName = (group, column) => (column ? `output of sublayer ${column - 1}, ${group.depth.kinds[column - 1]}` : "embedding");

// Weights of one read. A frame holds the lower triangle row after row: read r has the r + 1 sources before it.

function shares(values) {
  const total = values.reduce((sum, value) => sum + Math.abs(value ?? 0), 0) || 1;
  return values.map((value) => (value === null ? null : value / total));
}
function weightsOf(group, frame, read) {
  const start = (read * (read + 1)) / 2, own = frame.mixing.slice(start, start + read + 1);
  if (state.rows === "applied") return own;
  if (state.rows === "share") return shares(own);
  const theirs = shares(frameAt(baselineOf(group), frame.step).mixing.slice(start, start + read + 1));
  return shares(own).map((value, i) => (value === null || theirs[i] === null ? null : value - theirs[i]));
}
const isMapped = (group) => Boolean(group.depth) && group.depth.frames.every((frame) => frame.mixing);
function subtractable(group) {
  const base = baselineOf(group);
  return Boolean(base) && base !== group && isMapped(group) && isMapped(base) && base.depth.kinds.length === group.depth.kinds.length;
}
