// Colours of weights, in steps that change evenly in lightness; their scale, and the cells of a map.

function ramp(name) {
  const stops = getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/)
    .map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return (share) => {
    const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    return `rgb(${stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i))).join(" ")})`;
  };
}
// The root of the weight: a share of a tenth among fifty sources is much, and must not look like none.
function painter(most) {
  const warm = ramp("--heat"), cold = ramp("--cold");
  return (value) => (value < 0 ? cold : warm)(Math.sqrt(Math.abs(value) / most));
}

function drawScale(title, most, clipped, negative, paint) {
  const width = 210, from = negative ? -1 : 0, svg = make("svg", { width: width + 40, height: 42, role: "img", "aria-label": `Colour scale, ${short(from * most, 2)} to ${short(most, 2)}` });
  const X = (share) => 16 + ((share - from) / (1 - from)) * width;
  svg.append(make("text", { class: "name", x: 16, y: 11 }, title));
  for (let i = 0; i < 60; i++) {
    const share = from + ((i + 0.5) / 60) * (1 - from);
    svg.append(make("rect", { x: 16 + (i * width) / 60, y: 16, width: width / 60 + 0.5, height: 9, fill: paint(Math.sign(share) * share * share * most) }));
  }
  for (const part of negative ? [0, 0.25, 1] : [0, 0.05, 0.2, 0.5, 1]) {
    for (const sign of negative && part > 0 ? [-1, 1] : [1]) {
      const beyond = clipped && part === 1 ? (sign > 0 ? "≥ " : "≤ ") : "";
      svg.append(make("text", { x: X(sign * Math.sqrt(part)), y: 38, "text-anchor": "middle" }, beyond + short(sign * part * most, 2)));
    }
  }
  host("scale").replaceChildren(svg);
}
function paintCells(values, { size, tall, width, height, row }, paint) {
  const dense = devicePixelRatio || 1, snap = (v) => Math.round(v * dense), seam = size > 8 ? 1 : 0, hem = tall > 8 ? 1 : 0;
  const canvas = make("canvas", { width: Math.ceil(width * dense), height: Math.ceil(height * dense) }), pen = canvas.getContext("2d");
  let cells = 0;
  values.forEach((weights, r) => weights.forEach((weight, column) => {
    if (weight === null) return;
    cells++;
    const [x0, x1, y0, y1] = [column * size, (column + 1) * size, row(r), row(r) + tall].map(snap);
    pen.fillStyle = paint(weight);
    pen.fillRect(x0, y0, x1 - x0 - seam, y1 - y0 - hem);
  }));
  canvas.dataset.cells = cells;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  return canvas;
}
