"""Scripts that a page runs by itself in the browser. Everything else is asked of the routes."""

COPY = """
document.addEventListener("click", (event) => {
  const button = event.target.closest(".oc-copy");
  if (!button) return;
  navigator.clipboard.writeText(button.dataset.text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
"""
DISMISS = """
element.addEventListener("click", (event) => { if (event.target.closest("button")) props.value = ""; });
document.addEventListener("click", (event) => { if (event.target.closest("[role=tab]")) props.value = ""; });
"""
"""Takes a refusal away, also when another panel is opened: it is not about that one."""
GONE = """
let unanswered = 0;
setInterval(async () => {
  const answers = await fetch("/health", {cache: "no-store"}).then((answer) => answer.ok, () => false);
  if (answers && document.body.classList.contains("oc-gone")) location.reload();
  unanswered = answers ? 0 : unanswered + 1;
  document.body.classList.toggle("oc-gone", unanswered > 1);
}, 2000);
"""
"""Says that the panels' server does not answer, in place of what each part of the page would say of it."""
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
