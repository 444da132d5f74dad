// The table is sorted by any of its columns: up, down, and back to its own order.

function sortable(table) {
  const body = table.tBodies[0], rows = [...body.rows];
  const numeric = (column) => rows.some((row) => row.cells[column].dataset.value !== undefined);
  const valueOf = (row, column) => {
    const { dataset: { value }, textContent } = row.cells[column];
    if (value !== undefined) return Number(value);
    return numeric(column) ? null : textContent;
  };
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if ("fixed" in head.dataset) return;
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")] || "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      const way = next === "descending" ? -1 : 1, known = rows.filter((row) => valueOf(row, column) !== null);
      known.sort((a, b) => way * compare(valueOf(a, column), valueOf(b, column)));
      body.replaceChildren(...(next === "none" ? rows : known.concat(rows.filter((row) => !known.includes(row)))));
    });
  });
}
