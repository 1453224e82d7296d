"""Model.forward, traced by torch.fx, as the entries of a chain."""

from __future__ import annotations

from torch import fx, nn
from torch.fx.node import map_arg

from codegen.from_module import calls
from codegen.from_module.entries import Traced
from codegen.from_module.faults import Fault, Unfit, first_line, line_of
from codegen.from_module.operators import DETACH, NoOperator, Operators, Property
from codegen.from_module.tracer import Tracer


def trace(model: nn.Module, path: str, source: list[str], shapes: list[tuple[int, ...]]) -> Traced:
    """Trace `model` (whose class is defined in the file at `path` with the lines `source`) for inputs of `shapes` and read its graph as a chain."""
    tracer = Tracer(path, shapes)
    failure = None
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the file's forward raises is a fault of the file
        graph = getattr(tracer, "graph", fx.Graph())
        if isinstance(error, fx.proxy.TraceError):
            said = "forward's course depends on what x holds; a chain does the same for every input"
        else:
            said = f"forward cannot be traced: {first_line(error)}"
        failure = Fault(line_of(error, path), said)
    walk = _Walk(model, source, len(shapes))
    walk.graph(graph)
    walk.traced.faults = list(dict.fromkeys(walk.traced.faults))
    if failure:
        walk.traced.faults.append(failure)
        walk.traced.whole = False
    return walk.traced


def _write_numbers(graph: fx.Graph) -> None:
    """Puts the number in the place of `v.new_full((), number)`, which is how a forward hands one to an operator that takes tensors only."""
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "new_full" and len(node.args) == 3 and node.args[1] == () and isinstance(node.args[2], (int, float)):
            for user in list(node.users):
                user.args, user.kwargs = (map_arg(held, lambda n, node=node: node.args[2] if n is node else n) for held in (user.args, user.kwargs))
            graph.erase_node(node)


class _Walk(Operators):
    """Follows the one value from operator to operator. Faults are collected and the walk goes on behind them."""

    def __init__(self, model: nn.Module, source: list[str], given: int) -> None:
        super().__init__(model, source)
        self.given = given
        self.properties: set[fx.Node] = set()  # what is no tensor, and what is computed from it: told where it is asked for

    def graph(self, graph: fx.Graph) -> None:
        _write_numbers(graph)
        absorbed = self.find_silu(graph)
        live = self.live(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "output":
                self.output(node)
            elif node in live and node.op != "get_attr" and node not in absorbed:
                self.operator(node)

    def placeholder(self, node: fx.Node) -> None:
        if len(self.inputs) == self.given:
            self.faulty.add(node)
            self.fault(node, f"forward takes {node.target}, and get_inputs gives {self.given} {'input' if self.given == 1 else 'inputs'}")
            return
        self.current = self.current or node
        self.inputs[node] = node.target
        self.traced.inputs.append(node.target)

    def live(self, graph: fx.Graph) -> set[fx.Node]:
        """Nodes that the result depends on; the others compute something that nobody reads. All of them where tracing stopped early."""
        nodes = list(graph.nodes)
        if not any(node.op == "output" for node in nodes):
            return set(nodes)
        found: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.op == "output" or self.is_in_place(node) or any(user in found for user in node.users):
                found.add(node)
        return found

    def output(self, node: fx.Node) -> None:
        returned = node.args[0]
        if returned in self.pairs:
            self.fault(returned, f"gives indices beside values: {self.text(returned)}; return the values alone, by [0] or .values")
            return
        if isinstance(returned, fx.Node) and not self.keeps_gradients(returned):
            self.traced.faults.append(Fault(self.line(returned), f"detach cuts off the gradient of the result: {self.text(returned)}; {DETACH}"))
        elif not isinstance(returned, fx.Node) or (self.now(returned) is not self.current and not self.faulty):
            self.traced.faults.append(Fault(self.line(node) or self.line(self.current), "forward must return the last operator's result and nothing else"))

    def find_silu(self, graph: fx.Graph) -> set[fx.Node]:
        """Products v * sigmoid(v); returns the sigmoids that are part of one."""
        absorbed = set()
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and calls.ARITHMETIC.get(calls.function_name(node)) == "mul" and len(node.args) == 2:
                for v, gate in (node.args, node.args[::-1]):
                    if isinstance(v, fx.Node) and isinstance(gate, fx.Node) and self.is_sigmoid(gate) and gate.args[:1] == (v,) and len(gate.users) == 1:
                        self.silu[node] = v
                        absorbed.add(gate)
                        break
        return absorbed

    def is_sigmoid(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.model.get_submodule(node.target)) is nn.Sigmoid
        if self.is_in_place(node):
            return False
        return node.op in ("call_function", "call_method") and calls.FUNCTIONS.get(calls.function_name(node), ("",))[0] == "sigmoid"

    def operator(self, node: fx.Node) -> None:
        inputs = [self.silu[node]] if node in self.silu else [n for n in node.all_input_nodes if not self.is_parameter(n)]
        before = self.current
        self.traced.used.update(self.owner_of(n).split(".")[0] for n in node.all_input_nodes if self.is_parameter(n))
        if "mode" in node.meta:
            self.fault(node, f"{node.meta['mode']}, which the kernels cannot keep: {self.text(node)}")
        if node.op == "call_function" and calls.function_name(node) == "getitem" and node.args[0] in self.faulty:
            self.faulty.add(node)  # one result out of a refused operator's tuple: no fault of its own
            self.current = node
            return
        if (inputs and self.properties.issuperset(inputs)) or (not inputs and self.is_of_parameter(node)):
            if inputs:
                self.properties.add(node)
            return
        if self.is_copy(node, inputs):
            return
        try:
            entry = self.entry(node, inputs)
        except Unfit as unfit:
            told = [n for n in inputs if n is not before and (n in self.faulty or n in self.properties)]
            if not told or isinstance(unfit, NoOperator):  # else it only follows from what is wrong with its operand
                self.fault(node, str(unfit))
            if isinstance(unfit, Property):
                self.properties.add(node)
                return
            self.faulty.add(node)
            self.excused.add(before)
            if not inputs:
                return
        else:
            if entry is not None:
                self.traced.entries.append(entry)
            if self.traced.entries:
                self.places[node] = len(self.traced.entries) - 1
            else:
                self.inputs[node] = self.inputs[before]
        if self.is_in_place(node):
            self.overwritten[node.args[0] if node.args and node.args[0] in self.copies else before] = node
        self.current = node

    def is_copy(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """Does the node give the values of another, with or without their gradients? It is noted as that."""
        if node.op == "call_module" and isinstance(self.model.get_submodule(node.target), nn.Identity) and len(inputs) == 1:
            self.drop(node, f"self.{node.target} (Identity) does nothing and is left out")
        elif node.op not in ("call_function", "call_method") or calls.function_name(node) not in calls.SAME or len(inputs) != 1 or inputs[0] in self.pairs:
            return False
        elif calls.function_name(node) == "detach":
            self.detached.add(node)
        self.copies[node] = self.now(inputs[0]) if calls.function_name(node) == "clone" else inputs[0]
        if not self.keeps_gradients(inputs[0]):
            self.detached.add(node)
        return True
