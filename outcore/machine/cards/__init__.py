"""Cards by their data sheets, and machines around them, to plan for what is not here."""

from outcore.machine.cards.table import CARDS, Card, card_by_name, load_machine, machine_of, shipped_profiles
