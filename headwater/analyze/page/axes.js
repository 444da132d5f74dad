// Axes: the y title stands above the plot and the x title below its right end, so that no text is turned.

function axes(where, { height, x, y, xTitle, yTitle, xTicks, yTicks, yLog, label, margin = 10 }) {
  const width = Math.max(200, where.clientWidth);
  const rows = yTicks ?? (yLog ? logTicks : linearTicks)(y[0], y[1], Math.max(3, Math.round(height / 55)));
  const left = rows.length ? 12 + 7.4 * Math.max(...rows.map((tick) => tick.label.length), 2) : 10;
  const box = { left, top: 24, right: width - margin, bottom: height - 40 };
  const place = (v, [a, b], from, to) => from + ((v - a) / (b - a || 1)) * (to - from);
  const bend = yLog ? Math.log10 : (v) => v;
  const X = (v) => place(v, x, box.left, box.right), Y = (v) => place(bend(v), y.map(bend), box.bottom, box.top);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: 0 });
  for (const { value, label: words } of rows) {
    svg.append(make("line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) }));
    svg.append(make("text", { x: box.left - 7, y: Y(value) + 4, "text-anchor": "end" }, words));
  }
  for (const { value, label: words } of xTicks(box.right - box.left)) {
    svg.append(make("line", { class: "axis", x1: X(value), x2: X(value), y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(make("text", { x: X(value), y: box.bottom + 17, "text-anchor": "middle" }, words));
  }
  svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  svg.append(make("text", { class: "name", x: 0, y: 11 }, yTitle));
  svg.append(make("text", { x: box.right, y: height - 4, "text-anchor": "end" }, xTitle));
  where.replaceChildren(svg);
  return { svg, X, Y, box };
}

// A point without neighbours is a stroke of no length, which round caps make a dot.
function path(xs, ys, X, Y, from = -Infinity) {
  let d = "", pen = "M";
  ys.forEach((value, i) => {
    if (value === null || value === undefined || xs[i] < from) { pen = "M"; return; }
    const alone = pen === "M" && (ys[i + 1] === null || ys[i + 1] === undefined);
    d += `${pen}${X(xs[i]).toFixed(1)},${Y(value).toFixed(1)}${alone ? "h0" : ""}`;
    pen = "L";
  });
  return d;
}
