"use strict";
// Folding, tabs, tooltips and the copy button. Text only ever goes in as text.
document.documentElement.classList.add("js");
document.addEventListener("DOMContentLoaded", () => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const tabs = all('[role="tab"]');
  const choose = (tab) => {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", chosen);
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).classList.toggle("shown", chosen);
    }
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  const first = tabs.find((tab) => tab.getAttribute("aria-selected") === "true");
  if (first) choose(first);

  const fold = (button, open) => {
    button.setAttribute("aria-expanded", open);
    document.getElementById(button.getAttribute("aria-controls")).classList.toggle("open", open);
  };
  const layers = all(".layer button");
  for (const button of layers) {
    button.addEventListener("click", () => fold(button, button.getAttribute("aria-expanded") !== "true"));
  }
  for (const button of all("[data-fold]")) {
    button.addEventListener("click", () => layers.forEach((layer) => fold(layer, button.dataset.fold === "open")));
  }

  const tip = document.getElementById("tip");
  const line = (tag, text) => tip.append(Object.assign(document.createElement(tag), { textContent: text }));
  const describe = (cell) => {
    const row = cell.parentElement;
    let column = 0;
    for (let c = cell; (c = c.previousElementSibling); ) column += c.colSpan;
    const head = cell.closest("table").tHead.rows[0].cells[column];
    const name = row.cells[0].dataset.m || row.cells[0].title || row.cells[0].textContent;
    tip.replaceChildren();
    line("b", cell.dataset.o ? `${name}.${cell.dataset.o}` : name);
    if (cell.dataset.o) line("span", "the worst of its layer");
    const what = cell.colSpan > 1 ? head.textContent.replace(/ A$/, "") : head.textContent;
    line("span", `${what}: relative error ${cell.textContent.replace("✕ ", "")}`);
    line("span", `limit ${cell.dataset.l || head.dataset.limit}` + (cell.textContent.includes("✕") ? ", beyond it" : ""));
    if (cell.dataset.n) line("span", cell.dataset.n);
  };
  for (const table of all(".heat")) {
    table.addEventListener("mouseover", (event) => {
      const cell = event.target.closest("td[class]:not(.how)");
      tip.hidden = !cell;
      if (cell) describe(cell);
    });
    table.addEventListener("mousemove", (event) => {
      const x = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 12);
      const below = event.clientY + 20;
      const y = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 14 : below;
      tip.style.left = `${x}px`;
      tip.style.top = `${y}px`;
    });
    table.addEventListener("mouseleave", () => { tip.hidden = true; });
  }

  const copy = document.getElementById("copy");
  copy.addEventListener("click", async () => {
    const code = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code); // where a page may not write: selected, one key away
      document.execCommand("copy");
    }
    copy.textContent = "copied";
    setTimeout(() => { copy.textContent = "copy"; }, 1500);
  });
});
