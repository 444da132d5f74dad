// The chosen read taken apart, source by source; and what the model says without the chosen source.

// Three digits, trailing zeros too, since they stand one below the other.
const inColumn = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e3 ? minus(value.toPrecision(3)) : short(value, 3));

function drawSources(where, model) {
  const read = Math.min(state.read, model.depth), weights = weightsOf(model, read), shares = sharesOf(model, read), here = effectsOf(model, read);
  const widest = Math.max(...shares.map(Math.abs)) || 1, spoken = chosen() !== null;
  const heads = ["Source", "Weight", ...(here ? ["Δ loss here"] : []), ...(model.removed ? ["Δ loss at all reads"] : []), ...(spoken ? ["Says"] : [])];
  const rows = weights.map((weight, source) => {
    const name = make("button", { type: "button", "aria-label": `Choose the ${sourceName(model, source)}` }, sourceLetter(model, source), source ? String(source - 1) : "embedding");
    const bar = make("i", { class: "weightbar" });
    Object.assign(bar.style, { width: `${(54 * Math.abs(shares[source])) / widest}px`, background: `var(${weight < 0 ? "--c2" : "--c1"})` });
    const number = (value, ...inside) => make("td", value === null ? {} : { "data-value": value }, ...inside);
    const row = make("tr", source === state.source ? { class: "chosen" } : {}, make("th", { scope: "row", "data-value": source }, name), number(weight, bar, make("span", {}, inColumn(weight))),
      ...(here ? [number(here[source], nats(here[source]))] : []), ...(model.removed ? [number(effectOf(model, source), nats(effectOf(model, source)))] : []),
      ...(spoken ? [make("td", { class: "words" }, ...topOf(model.sources, source).slice(0, 2).flatMap(({ place }) => [tokenNode(place), " "]))] : []));
    row.addEventListener("click", () => pick({ source }));
    return row;
  });
  const table = make("table", { class: "sources" }, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col", ...(head === "Says" ? { "data-fixed": "" } : {}) }, head)))), make("tbody", {}, ...rows));
  const title = make("p", { class: "title" }, ...(models.length > 1 ? [swatch(model)] : []), make("strong", {}, readName(model, read)));
  where.replaceChildren(title, make("div", { class: "tall", tabindex: 0, role: "region", "aria-label": `Sources of ${readName(model, read)}` }, table));
  sortable(table);
  const row = table.querySelector(".chosen");
  if (row) showInside(where.lastChild, row);
}

function odds(top) {
  const list = make("div", { class: "odds" }), next = nextOf();
  for (const { place, p } of top) {
    const bar = make("i"), node = tokenNode(place);
    bar.style.width = `${100 * p}%`;
    if (place === next) node.classList.add("next");
    list.append(node, bar, make("span", { class: "percent" }, percent(p)));
  }
  return list;
}
function drawWithout() {
  host("without").replaceChildren(...models.map((model) => {
    const panel = make("div", { class: "panel" }, panelTitle(model)), read = Math.min(state.read, model.depth), source = Math.min(state.source, read);
    const everywhere = state.scope === "all", removal = everywhere ? model.removed : model.removedAt;
    if (!removal) panel.append(make("p", { class: "empty" }, everywhere ? "Nothing was taken away: --removals sources does." : "Effects at one read were not computed: --removals pairs does."));
    else panel.append(...verdict(model, read, source, everywhere, removal));
    return panel;
  }));
}
function verdict(model, read, source, everywhere, removal) {
  const change = everywhere ? effectOf(model, source) : effectsOf(model, read)[source], place = everywhere ? source : pair(read, source);
  const where = everywhere ? "at every read" : placeName(model, read);
  const about = change === null ? "the text ends here, so no loss changes" : `the loss ${chosen() === null ? "of a token, on average, " : ""}changes by `;
  const words = make("p", { class: "verdict" }, `Without the ${sourceName(model, source)}, ${where}, ${about}`, ...(change === null ? ["."] : [make("strong", {}, nats(change)), " nats."]));
  if (chosen() === null) return [words, make("p", { class: "caption" }, "Pick a token to see what the model would say.")];
  const after = topOf(removal.top, place), column = (title, top) => make("div", {}, make("h4", {}, title), odds(top));
  const missing = after.length ? [] : [make("p", { class: "caption" }, "What it then expects was left out of this page.")];
  return [words, make("div", { class: "beside" }, column("it expects", topOf(model.reads, model.depth)), ...(after.length ? [column("without it", after)] : [])), ...missing];
}
