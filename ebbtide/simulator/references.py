"""Tuples of arrays that go by reference from one compiled function to the next.

Numba hands a tuple over array by array and field by field: with thirty arrays some two hundred arguments a call, which
takes minutes to compile and is slow unless everything is inlined. A `by_reference` tuple is one pointer. Interpreted it
is the tuple itself.
"""

from __future__ import annotations

import functools
import operator
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def by_reference(values: T) -> T:
    """A NamedTuple, of arrays and of NamedTuples of such, that functions called with it get as one pointer.

    Where it is compiled it is valid until the function that called this returns, and its fields can only be read. No
    index of arrays of Ebbtide's classes that is worked out is counted from their end (a constant `int` is): one below
    0 lies before them, and is checked with NUMBA_BOUNDSCHECK=1 in the environment only.
    """
    return values


@functools.cache
def teach() -> None:
    """Teach numba what `by_reference` is."""
    ir: Any = import_module("llvmlite.ir")
    cgutils: Any = import_module("numba.core.cgutils")
    imputils: Any = import_module("numba.core.imputils")
    types: Any = import_module("numba.core.types")
    templates: Any = import_module("numba.core.typing.templates")
    extending: Any = import_module("numba.extending")

    class Forward(types.Array):  # type: ignore[misc]
        """An array whose indices count from its beginning; of others numba asks whether each does, at every access."""

        def __init__(self, kind: Any) -> None:
            name = f"forward.{kind}"
            super().__init__(kind.dtype, kind.ndim, kind.layout, not kind.mutable, name, kind.aligned)

    extending.register_model(Forward)(extending.models.ArrayModel)

    @extending.lower_cast(Forward, types.Array)  # type: ignore[untyped-decorator]
    def _either(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
        """For a variable that is now such an array, now another."""
        return value

    def forward(kind: Any, value: Any) -> Any:
        """The type of an index, as one without a sign: that is not asked. What is known needs no question."""
        if isinstance(kind, types.BaseTuple):
            parts = {}
            while isinstance(value, ir.instructions.InsertValue):
                parts[value.indices[0]], value = value.value, value.aggregate
            return types.Tuple([forward(one, parts.get(place)) for place, one in enumerate(kind)])
        return types.uintp if isinstance(kind, types.Integer) and not isinstance(value, ir.Constant) else kind

    def _item(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, values = list(signature.args), list(args)
        array, index = kinds[:2]
        kinds[0] = types.Array(array.dtype, array.ndim, array.layout, not array.mutable, None, array.aligned)
        kinds[1] = forward(index, values[1])
        values[1] = context.cast(builder, values[1], index, kinds[1])
        what = operator.getitem if len(kinds) == 2 else operator.setitem
        return context.get_function(what, templates.signature(signature.return_type, *kinds))(builder, values)

    for index in (types.Integer, types.BaseTuple):
        extending.lower_builtin(operator.getitem, Forward, index)(_item)
        extending.lower_builtin(operator.setitem, Forward, index, types.Any)(_item)

    class Reference(types.Type):  # type: ignore[misc]
        def __init__(self, values: Any) -> None:
            self.values = values
            self.instance_class = values.instance_class
            super().__init__(f"ref.{values.instance_class.__name__}")

        @property
        def key(self) -> Any:
            return self.values

    @extending.register_model(Reference)
    class _Model(extending.models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, manager.lookup(kind.values).get_value_type().as_pointer())

    @templates.infer_global(by_reference)
    class _Typing(templates.AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            (values,) = args
            return templates.signature(Reference(values), values) if isinstance(values, types.NamedTuple) else None

    @extending.lower_builtin(by_reference, types.NamedTuple)  # type: ignore[untyped-decorator]
    def _lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = cgutils.alloca_once_value(builder, args[0])
        # What was written before cannot be mixed up with what is read through this: all that follows may take it for
        # constant.
        hidden = ir.InlineAsm(ir.FunctionType(place.type, [place.type]), "", "=r,0,~{memory}", side_effect=True)
        return builder.call(hidden, [place])

    @templates.infer_getattr
    class _Fields(templates.AttributeTemplate):  # type: ignore[misc]
        key = Reference

        def generic_resolve(self, reference: Any, name: str) -> Any:
            values = reference.values
            if name not in values.fields:
                return None
            kind = values.types[values.fields.index(name)]
            if isinstance(kind, types.Array):
                # Kernels of others may count from the end of arrays of theirs.
                return Forward(kind) if values.instance_class.__module__.startswith("ebbtide.") else kind
            return Reference(kind) if isinstance(kind, types.NamedTuple) else kind

    @extending.lower_getattr_generic(Reference)  # type: ignore[untyped-decorator]
    def _field(context: Any, builder: Any, reference: Any, value: Any, name: str) -> Any:
        index = reference.values.fields.index(name)
        kind = reference.values.types[index]
        place = cgutils.gep_inbounds(builder, value, 0, index)
        if isinstance(kind, types.NamedTuple):
            return place
        return imputils.impl_ret_borrowed(context, builder, kind, _load(builder, place))

    def _load(builder: Any, place: Any) -> Any:
        """The value at a place, number by number: what is loaded whole loses on its way that it is constant."""
        kind = place.type.pointee
        if isinstance(kind, ir.Aggregate):
            value = ir.Constant(kind, ir.Undefined)
            for index in range(len(kind)):
                value = builder.insert_value(
                    value, _load(builder, cgutils.gep_inbounds(builder, place, 0, index)), index
                )
            return value
        value = builder.load(place)
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value
