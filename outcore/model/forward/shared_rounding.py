"""A pass of torch's compiler: what several linear layers take (queries, keys and values; a gate and what it gates) is
rounded to 8 bits once. The compiler itself joins equal operations only in graphs that it differentiates. Imported where
layers multiply in float8 only, as it imports the compiler."""

from __future__ import annotations

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class SharedRounding(CustomGraphPass):
    """Leaves the first of equal views and roundings in a graph without mutations."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        first: dict[str, torch.fx.Node] = {}
        for node in graph.nodes:
            if node.target in (*VIEWS, torch.ops.outcore.float8_rounded.default):
                kept = first.setdefault(repr((node.target, node.args, node.kwargs)), node)  # nodes by their names
                if kept is not node:
                    node.replace_all_uses_with(kept)
                    graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))
