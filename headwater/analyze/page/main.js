// Controls, and the first drawing of everything.

function drawLegends() {
  for (const legend of document.querySelectorAll(".legend")) {
    if (legend.classList.contains("again") && groups.length <= CROWD) continue;
    legend.replaceChildren(...groups.map((group) => {
      const button = make("button", { type: "button", "aria-pressed": "true", "data-arm": group.index }, swatch(group), make("code", {}, group.label));
      button.addEventListener("click", () => {
        if (!state.hidden.delete(group)) state.hidden.add(group);
        for (const twin of document.querySelectorAll(`.legend [data-arm="${group.index}"]`)) twin.setAttribute("aria-pressed", String(visible(group)));
        draw();
      });
      button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch" && visible(group)) light(group); });
      button.addEventListener("pointerleave", () => light(null));
      return button;
    }));
  }
}

function addControls() {
  const set = (key, redraw) => [() => state[key], (value) => { state[key] = value; redraw(); }];
  host("range").append(choice("range", "", [["all", "whole run"], ["half", "last half"], ["tenth", "last tenth"]], ...set("range", drawLoss)));
  if (!deep.length) return;
  host("reads").append(choice("reads", "Reads", [["all", "all"], ...kinds.map((kind) => [kind, `before ${kind}`])], ...set("reads", drawMaps)));
  const bases = new Set(groups.filter(subtractable).map(baselineOf));
  const minusBase = bases.size ? [["difference", `minus ${bases.size === 1 ? [...bases][0].label : "the baseline"}`]] : [];
  host("rows").append(choice("rows", "Weights", [["share", "each row sums to one"], ["applied", "as applied"], ...minusBase], ...set("rows", drawMaps)));
  host("kinds").append("Marks beside the rows, under the columns and in the charts below: ", ...kinds.slice(0, 2).map((kind) => {
    const more = kinds.indexOf(kind) && kinds.length > 2 ? "other sublayers" : kind, mark = { class: `kind${hollow(kind)}` };
    const bar = make("rect", { ...mark, x: 1, y: 1, width: 4, height: 8, "stroke-width": 0.6 }), dot = make("circle", { ...mark, cx: 13, cy: 5, r: 4 });
    return make("span", {}, make("svg", { width: 18, height: 10 }, bar, dot), more);
  }));
  addSlider();
}
function addSlider() {
  const last = steps.at(-1), words = (frame) => `step ${frame.step} · ${many(frame.tokens)} tokens`;
  const recorded = Math.max(...deep.map((group) => group.depth.recorded)), thinned = deep.some((group) => group.depth.recorded > group.depth.frames.length);
  host("frames").textContent = thinned ? `Thinned for this page: ${steps.length} of ${recorded} depth records.` : "";
  if (steps.length < 2) return void host("slider").append(make("output", {}, `Recorded at ${words(last)}`));
  const input = make("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Training step of the depth charts", "aria-valuetext": words(last) });
  const output = make("output", {}, words(last));
  input.addEventListener("input", () => {
    const frame = steps[input.value];
    state.step = frame.step;
    output.textContent = words(frame);
    input.setAttribute("aria-valuetext", words(frame));
    drawMaps();
    drawMeasures();
  });
  host("slider").append(input, output);
}

function draw() {
  leave();
  drawLoss();
  drawMaps();
  drawMeasures();
  drawThumbnail();
}
drawLegends();
addControls();
draw();
sortable(host("table"));
if (host("mixing")) sortable(host("mixing"));
addSaves();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
