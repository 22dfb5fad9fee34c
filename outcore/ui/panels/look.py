"""Look of the panels: the system's own fonts, light and dark, from 390 pixels on."""

from __future__ import annotations

from gradio import themes

from outcore.ui.panels.script import COPY, GONE

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Consolas", "Liberation Mono", "monospace")
CSS = """
:root { --oc-1:#2563eb; --oc-2:#d97706; --oc-3:#059669; --oc-4:#7c3aed; --oc-5:#db2777; --oc-6:#0891b2; --oc-7:#737373;
  --oc-bad:#b91c1c; --oc-good:#047857; --oc-mark:#b7e4c7; }
.dark { --oc-1:#60a5fa; --oc-2:#fbbf24; --oc-3:#34d399; --oc-4:#a78bfa; --oc-5:#f472b6; --oc-6:#22d3ee; --oc-7:#a3a3a3;
  --oc-bad:#fca5a5; --oc-good:#6ee7b7; --oc-mark:#1b5e3b; }
html { scroll-padding-bottom: 140px; }
.gradio-container { width: 100% !important; max-width: 1360px !important; margin: 0 auto !important;
  overflow: visible !important; }
.gradio-container main, .gradio-container .main, .gradio-container .wrap, .gradio-container .tabs,
.gradio-container .tabitem, .gradio-container .tabitem > .column { width: 100% !important; box-sizing: border-box; }
.gradio-container .tabitem .column, .gradio-container .tabitem .row { min-width: 0; }
.gradio-container .html-container { padding: 2px 0 !important; }
.gradio-container .block:has(> .html-container > .prose:empty) { display: none; }
#chat { height: calc(100dvh - 420px); min-height: 220px; overflow-y: auto !important; border-radius: 6px;
  border: 1px solid var(--border-color-primary) !important; display: flex; flex-direction: column-reverse; }
#chat .html-container { margin-bottom: auto; }
#chat .oc > p { padding: 8px 14px; }
#chat article { padding: 8px 14px; position: relative; }
#chat article.user { background: var(--background-fill-secondary); }
#chat .text { white-space: pre-wrap; }
#chat .md > :first-child { margin-top: 0; }
#chat .md ul, #chat .md ol { padding-left: 22px; margin: 4px 0; list-style: revert; }
#chat .md h1, #chat .md h2, #chat .md h3 { font-size: 15px; font-weight: 600; margin: 10px 0 4px; }
#chat .md blockquote { border-left: 3px solid var(--border-color-primary); padding-left: 10px; }
#chat [contenteditable=plaintext-only] { outline: 2px solid var(--oc-1); padding: 4px; }
#chat [contenteditable=plaintext-only]::after { content: "Enter sends, Escape leaves it as it was"; display: block;
  font-size: 12px; color: var(--body-text-color-subdued); }
#chat .code { position: relative; }
#chat .code .oc-copy { position: absolute; right: 6px; top: 6px; }
.oc-copy, .oc-edit { font-size: 12px !important; font-weight: 400 !important; padding: 0 !important;
  border: 0 !important; margin: 0 10px 0 0 !important; background: none !important; text-decoration: underline;
  color: var(--body-text-color-subdued) !important; }
.oc td, .oc th { overflow-wrap: break-word; }
.oc thead, .oc tbody, .oc tr { border: 0 !important; }
.oc { color: var(--body-text-color); font-size: 14px; line-height: 1.5; overflow-wrap: anywhere; }
.oc h3 { font-size: 15px; font-weight: 600; margin: 12px 0 4px; }
.oc p { margin: 4px 0; }
.oc .dim { color: var(--body-text-color-subdued) !important; }
.oc .big { font-size: 20px; font-weight: 600; }
.oc .note { border-left: 3px solid var(--oc-2); padding: 4px 10px; margin: 6px 0; }
.oc .bad { border-left: 3px solid var(--oc-bad); padding: 4px 10px; margin: 6px 0; }
.oc .good { border-left: 3px solid var(--oc-good); padding: 4px 10px; margin: 6px 0; }
.oc .scroll { overflow-x: auto; max-width: calc(100vw - 36px); }
.oc table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; border: 0 !important; }
.oc th, .oc td { text-align: left; padding: 3px 12px 3px 0 !important; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; vertical-align: top; }
.oc th { font-weight: 600; white-space: nowrap; }
.oc td.n, .oc th.n { text-align: right; white-space: nowrap; }
.oc tr.picked td { font-weight: 600; }
.oc .bar { position: relative; display: flex; height: 18px; border-radius: 3px; overflow: hidden;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.oc .bar i { display: block; height: 100%; }
.oc .bar b { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--oc-bad); }
.oc .keys { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 3px 0 8px; font-size: 12px; }
.oc .keys i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.oc .grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 14px 22px; }
.oc .chart { min-width: 0; }
.oc .chart .head { display: flex; justify-content: space-between; gap: 8px; font-size: 13px; }
.oc .plot { position: relative; }
.oc .plot span { position: absolute; left: 5px; font-size: 11px; background: var(--background-fill-primary); }
.oc .plot .high { top: 2px; } .oc .plot .low { bottom: 2px; }
.oc .chart svg { display: block; width: 100%; height: 120px; border: 1px solid var(--border-color-primary);
  border-radius: 4px; background: var(--background-fill-primary); }
.oc .chart path { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.oc .chart .ends { display: flex; justify-content: space-between; font-size: 12px;
  color: var(--body-text-color-subdued); }
.oc pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; line-height: 1.45; margin: 4px 0;
  padding: 8px; max-height: 380px; overflow-y: auto; border: 1px solid var(--border-color-primary);
  border-radius: 4px; }
.oc .newest { display: flex; flex-direction: column-reverse; }
.oc mark { background: var(--oc-mark); color: inherit; }
.gradio-container a { color: inherit !important; text-decoration: underline; }
.oc-actions { flex-wrap: wrap !important; }
.oc-actions button { min-width: 110px !important; }
.gradio-container button.lg { font-size: 14px; font-weight: 600; padding: 8px 14px; }
:is(#outranks-gradio, .gradio-container) :focus-visible { outline: 3px solid var(--oc-1) !important;
  outline-offset: 1px; }
.gradio-container label:has(input[type=radio]:focus-visible) { outline: 3px solid var(--oc-1); }
:is(#outranks-gradio, .gradio-container) [role=tab]:focus-visible { outline-offset: -3px; }
.gradio-container input[role=combobox] { text-overflow: ellipsis; max-width: calc(100% - 34px); }
.gradio-container [role=tab][aria-selected=true] { color: var(--oc-1); font-weight: 600; }
.gradio-container code { font-size: 11px; background: none; padding: 0; border: 0; color: inherit; }
#notice { position: absolute; }
#notice .oc { position: fixed; z-index: 90; left: 50%; transform: translateX(-50%); top: 68px; display: flex; gap: 12px;
  width: min(640px, calc(100vw - 24px)); box-sizing: border-box; padding: 10px 14px; border-radius: 6px;
  background: var(--background-fill-primary); border: 2px solid var(--oc-bad); box-shadow: 0 4px 18px #0004; }
#notice p { flex: 1; } #notice button { font-size: 16px; align-self: flex-start; padding: 2px 8px; }
#gone { display: none; }
.oc-gone #gone { display: block; position: fixed; inset: 0 0 auto 0; z-index: 100; padding: 12px 16px;
  background: var(--background-fill-primary); border-bottom: 3px solid var(--oc-bad); box-shadow: 0 4px 18px #0004; }
.oc-gone .toast-wrap, .oc-gone [data-testid=status-tracker] { display: none !important; }
#conversations:has(#search_conversations :placeholder-shown) #conversation::after { content: none; }
#conversation:not(:has(label))::after { content: "No conversation has these words."; padding: 6px 8px; }
#conversation { overflow: visible !important; }
#conversation .wrap { flex-direction: column; flex-wrap: nowrap; gap: 0; max-height: calc(100dvh - 330px);
  overflow-y: auto; }
#conversation label { width: 100%; border: 0; padding: 6px 8px; background: none; box-shadow: none; }
#conversation label:has(:checked) { background: var(--background-fill-secondary); font-weight: 600;
  box-shadow: inset 3px 0 var(--oc-1); color: var(--body-text-color); }
#conversation input { appearance: none; width: 0; height: 0; margin: 0; border: 0; position: absolute; }
#conversation span { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; margin: 0; }
#talk .column { gap: 8px; }
#composer { position: sticky; bottom: 0; z-index: 20; background: var(--body-background-fill); padding: 6px 0; }
.oc-line { align-items: flex-end !important; gap: 8px; }
#stop_answer { background: var(--body-text-color); color: var(--body-background-fill); }
.oc-path { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 16px; }
#train_bar { background: var(--body-background-fill); }
@media (min-width: 900px) { .oc-side { position: sticky; top: 8px; align-self: flex-start; } }
@media (max-width: 640px) {
  .gradio-container .main.fillable { padding: 6px !important; }
  .gradio-container .tab-container button { padding: 0 6px !important; font-size: 12.5px !important; }
  .oc th, .oc td { padding-right: 8px; }
  .oc td:last-child:not(.n) { overflow-wrap: anywhere; white-space: normal; }
  .oc .chart svg { height: 96px; }
  #conversation { overflow: visible !important; }
#conversation .wrap { max-height: 92px; }
  #composer, #train_bar { position: fixed; left: 0; right: 0; bottom: 0; z-index: 20; padding: 8px 10px;
    border-top: 1px solid var(--border-color-primary); box-sizing: border-box; }
  #train_bar { flex-wrap: nowrap; } #train_bar .big { font-size: 15px; }
  .gradio-container .tabitem { padding-bottom: 130px; }
  #chat { height: calc(100dvh - 320px); }
  .oc-line { flex-wrap: wrap !important; } .oc-line > :first-child { flex-basis: 100% !important; }
}
"""
HEAD = (
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    f"<script>{COPY}{GONE}</script>"
    f"<style>{CSS}</style>"  # Gradio's own css argument narrows every rule to the inside of its container
)


def theme() -> themes.Base:
    """Gradio's plain theme in the system's fonts: nothing is fetched. Text contrasts by 4.5:1 at least."""
    return themes.Base(primary_hue="blue", neutral_hue="gray", font=FONTS, font_mono=MONO, text_size="sm").set(
        body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300",
        block_title_text_color="*neutral_900", block_title_text_color_dark="*neutral_100",
        input_placeholder_color="*neutral_500", input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_700", button_primary_background_fill_dark="*primary_700",
        button_cancel_background_fill="#b91c1c", button_cancel_background_fill_dark="#b91c1c",
        button_cancel_text_color="white", button_cancel_text_color_dark="white",
    )  # fmt: skip
