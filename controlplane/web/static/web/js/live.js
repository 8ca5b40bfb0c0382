"use strict";
// One EventSource per page. It turns messages into DOM events: parts refetch themselves on
// changed:<part> (hx-trigger), charts append on "point". After every (re)connection all is fetched.
(() => {
  const address = document.body.dataset.events;
  if (!address) return;
  const live = document.getElementById("live");
  const say = (lost) => {
    if (!live) return;
    live.classList.toggle("lost", lost);
    live.textContent = lost ? live.dataset.lost : live.dataset.live;
  };
  const tell = (name, detail) => document.body.dispatchEvent(new CustomEvent(name, { detail }));
  const source = new EventSource(address);
  let readied = false;
  source.addEventListener("ready", (event) => {
    say(false);
    for (const part of event.data.split(" ")) tell("changed:" + part);
    if (readied) tell("changed:charts");
    readied = true;
  });
  source.addEventListener("changed", (event) => tell("changed:" + event.data));
  source.addEventListener("point", (event) => tell("point", JSON.parse(event.data)));
  source.addEventListener("error", () => say(true));
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  // The favicon shows the worst state on the page.
  const icon = document.getElementById("favicon");
  const paint = () => {
    const part = document.querySelector("[data-page-state]");
    if (part) icon.href = icon.dataset.base + part.dataset.pageState + ".svg";
  };
  paint();
  document.addEventListener("htmx:after:swap", paint);
})();
