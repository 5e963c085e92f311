// Marks tables, code and outputs that are wider than their place on the side where there is more: book.css fades it.
document.addEventListener("DOMContentLoaded", () => {
  const mark = (box) => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", hidden > 1 && box.scrollLeft > 1);
    box.classList.toggle("more-right", hidden > 1 && box.scrollLeft < hidden - 1);
    if (hidden > 1) box.tabIndex = 0; // arrow keys scroll it
    else box.removeAttribute("tabindex");
  };
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
  for (const box of document.querySelectorAll("article .table-wrapper, article .output, article pre, article .wide")) {
    box.addEventListener("scroll", () => mark(box), { passive: true });
    sizes.observe(box); // also tells the first size, and that of a box in a part that is opened later
  }
});
