// Logit lens: what each read and each output would say if the model ended there.

const LENS = 5;
function drawLens() {
  host("says").replaceChildren(...models.map((model) => {
    const table = chosen() === null ? hitTable(model) : saidTable(model);
    return make("div", { class: "panel" }, panelTitle(model), make("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "What it says, by depth" }, table));
  }));
}
function depthRows(model, cells) {
  return Array.from({ length: model.depth + 2 }, (_, i) => {
    const name = i ? (i <= model.depth ? [letterOf(model.kinds[i - 1]), String(i - 1)] : ["head"]) : [sourceLetter(model, 0), "embedding"];
    const row = make("tr", i - 1 === state.read ? { class: "chosen" } : {}, make("th", { scope: "row" }, ...name), ...cells(i - 1, i <= model.depth ? i : null));
    if (i) row.addEventListener("click", () => pick({ read: i - 1, source: Math.min(state.source, i - 1) }));
    return row;
  });
}
const lensHead = (...columns) => make("thead", {}, make("tr", {}, ...columns.map(([words, span]) => make("th", { scope: "col", colspan: span }, words))));

// Sublayer i reads row i and writes source i + 1; the embedding is source 0, and the head reads last and writes nothing.
function saidTable(model) {
  const next = nextOf(), shown = Math.min(LENS, model.reads.count, models.length > 1 ? 3 : LENS);
  const cells = (top, row, kind) => (row === null || row < 0 ? Array.from({ length: shown }, () => make("td", { class: "said" })) : topOf(top, row).slice(0, shown).map(({ place, p }) => {
    const cell = make("td", { class: `said${place === next ? " next" : ""}`, title: `${kind}: ${percent(p)}` }, words(place));
    paintOn(cell, Math.sqrt(p));
    return cell;
  }));
  const rows = depthRows(model, (read, source) => [...cells(model.reads, read, "read"), make("td", { class: "gap" }), ...cells(model.sources, source, "output")]);
  return make("table", { class: "says" }, lensHead(["", 1], ["what it reads says", shown], ["", 1], ["what it writes says", shown]), make("tbody", {}, ...rows));
}
function hitTable(model) {
  const last = tokens.length - 1, hits = (top, row) => {
    let found = 0;
    for (let t = 0; t < last; t++) found += top.ids[(row * tokens.length + t) * top.count] === tokens[t + 1];
    return found / last;
  };
  const cell = (top, row) => {
    const node = make("td", { class: "hits" }), share = row === null || row < 0 ? null : hits(top, row);
    if (share === null) return node;
    const bar = make("i", { class: "weightbar" });
    Object.assign(bar.style, { width: `${100 * share}px`, background: "var(--c1)" });
    node.append(bar, make("span", {}, percent(share)));
    return node;
  };
  const rows = depthRows(model, (read, source) => [cell(model.reads, read), cell(model.sources, source)]);
  return make("table", { class: "says" }, lensHead(["", 1], ["what it reads: first guess right", 1], ["what it writes: first guess right", 1]), make("tbody", {}, ...rows));
}

// Which experts were chosen, where the model has any.

function drawExperts() {
  host("routing").hidden = !models.some((model) => model.experts.length);
  host("experts").replaceChildren(...models.map((model) => {
    const rows = model.experts.map((one) => make("tr", {}, make("th", { scope: "row" }, letterOf(model.kinds[one.sublayer]), String(one.sublayer)), make("td", {}, ...expertsOf(one).map(([expert, share]) =>
      make("span", { class: "expert" }, make("code", {}, String(expert)), make("small", {}, chosen() === null ? percent(share) : short(share, 3)))))));
    const table = make("table", { class: "experts" }, make("tbody", {}, ...rows));
    return make("div", { class: "panel" }, panelTitle(model), rows.length ? make("div", { class: "tall" }, table) : make("p", { class: "empty" }, "This model has no experts, or keeps them to itself."));
  }));
}
function expertsOf(one) {
  const token = chosen(), found = new Map();
  for (let i = 0; i < one.ids.length; i++) {
    if (token !== null && Math.floor(i / one.count) !== token) continue;
    found.set(one.ids[i], token === null ? (found.get(one.ids[i]) || 0) + 1 / tokens.length : one.p[i]);
  }
  return [...found].sort((a, b) => b[1] - a[1]).slice(0, 16);
}
