"use strict";
// Drag over the heat map: the list then holds the requests of that time and that latency.
(() => {
  const field = document.querySelector("svg.cells[data-edges]");
  if (!field) return;
  const edges = field.dataset.edges.split(" "), since = +field.dataset.since, until = +field.dataset.until;
  const box = document.createElementNS(field.namespaceURI, "rect");
  box.setAttribute("class", "dragged");
  let from = null, moved = false;
  const at = (event) => {
    const { left, top, width, height } = field.getBoundingClientRect();
    const share = (value) => Math.min(Math.max(value, 0), 1);
    return { x: share((event.clientX - left) / width), y: share((event.clientY - top) / height) };
  };
  const span = (a, b) => [Math.min(a, b), Math.max(a, b)];
  const end = () => { from = null; box.remove(); };
  field.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    event.preventDefault(); // a cell is a link, which the browser would drag
    from = at(event);
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!from) return;
    const to = at(event), [x1, x2] = span(from.x, to.x), [y1, y2] = span(from.y, to.y);
    if (!moved && x2 - x1 < 0.01 && y2 - y1 < 0.06) return;
    moved = true;
    field.append(box);
    for (const [name, value] of Object.entries({ x: x1, y: y1, width: x2 - x1, height: y2 - y1 })) {
      box.setAttribute(name, 100 * value + "%");
    }
  });
  addEventListener("pointerup", (event) => {
    if (!from) return;
    const [x1, x2] = span(from.x, at(event).x), [y1, y2] = span(from.y, at(event).y), rows = edges.length - 1;
    end();
    if (!moved) return;
    const address = new URL(location.href), ask = address.searchParams;
    const set = (name, value) => (value ? ask.set(name, value) : ask.delete(name));
    set("since", String(Math.floor(since + x1 * (until - since))));
    set("until", String(Math.ceil(since + x2 * (until - since))));
    const low = edges[Math.min(Math.floor(y2 * rows) + 1, rows)], high = edges[Math.floor(y1 * rows)];
    set("min_ms", low === "0" ? "" : low);
    set("max_ms", high === "-" ? "" : high);
    ask.delete("after");
    location.assign(address);
  });
  // What ended a drag is no choice of the cell below it.
  field.addEventListener("click", (event) => { if (moved) event.preventDefault(); moved = false; });
  addEventListener("keydown", (event) => { if (event.key === "Escape" && from) end(); });
})();
