"""What a page does by itself in the browser. Everything else is asked of the routes."""

COPY = """
document.addEventListener("click", (event) => {
  const button = event.target.closest(".oc-copy");
  if (!button) return;
  navigator.clipboard.writeText(button.dataset.text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
"""
EDIT = """
element.addEventListener("click", (event) => {
  const button = event.target.closest(".oc-edit");
  if (!button) return;
  const message = button.closest("article"), text = message.querySelector(".text"), before = text.textContent;
  text.contentEditable = "plaintext-only";
  text.focus();
  text.onkeydown = (key) => {
    const sends = key.key === "Enter" && !key.shiftKey;
    if (!sends && key.key !== "Escape") return;
    key.preventDefault();
    text.contentEditable = "false";
    if (sends) trigger("edit", {index: Number(message.dataset.index), value: text.innerText, previous_value: before});
    else text.textContent = before;
  };
});
"""
"""Lets one of the user's messages be written anew in its place. Enter sends it, Escape leaves it as it was."""
