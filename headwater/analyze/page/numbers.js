// Numbers as text, and the ticks of an axis.

const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const nearest = (values, wanted) => values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
const minus = (words) => words.replaceAll("-", "−");

function short(value, digits = 4) {
  if (value === null || value === undefined) return "—";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return minus(value.toExponential(2));
  return minus(String(Number(value.toPrecision(digits))));
}
const loss = (value) => (value === null || value === undefined ? "—" : minus(value.toFixed(4)));
const signed = (value) => (value > 0 ? "+" : "") + loss(value);
function unitOf(top) {
  return [[1e12, "trillion "], [1e9, "billion "], [1e6, "million "], [1e3, "thousand "]].find(([size]) => top >= size) || [1, ""];
}
function many(value) {
  const [size, name] = unitOf(value);
  return `${Number((value / size).toPrecision(3))} ${name}`.trim();
}

function linearTicks(low, high, count) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + step * 1e-9; k++) ticks.push(k * step);
  return ticks.map((value) => ({ value, label: minus((Math.abs(value) < step / 1e6 ? 0 : value).toFixed(Math.min(places, 12))) }));
}
function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), decades = Math.log10(high / low), ticks = [];
  const stride = Math.max(1, Math.ceil((last - first) / (2 * count)));
  const steps = decades < 1.3 ? [1, 2, 5] : decades < 2.6 ? [1, 3] : [1];
  for (let power = first; power <= last; power += stride)
    for (const m of steps) {
      const value = m * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, label: Math.abs(power) < 4 ? String(Number(value.toPrecision(1))) : minus(`${m}e${power}`) });
    }
  return ticks;
}
