document.addEventListener("DOMContentLoaded", () => {
  // Typeset the formulas that arithmatex has marked.
  for (const element of document.querySelectorAll(".arithmatex")) {
    const formula = element.textContent.trim().slice(2, -2); // without \( \) or \\[ \\]
    katex.render(formula, element, { displayMode: element.tagName === "DIV", throwOnError: false });
  }
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});
