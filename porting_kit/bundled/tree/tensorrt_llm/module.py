"""The base of every layer: a tree of named children and named parameters, as in torch.nn."""


class Module:
    """A node of the model. Assigning a Module or Parameter to an attribute registers it under that name."""

    def __init__(self):
        self.__dict__["_modules"] = {}
        self.__dict__["_parameters"] = {}

    def __setattr__(self, name, value):
        from .parameter import Parameter

        # Plain attributes may be set before Module.__init__ has run; the registries are not there yet then.
        modules, parameters = self.__dict__.get("_modules", {}), self.__dict__.get("_parameters", {})
        for registry in (modules, parameters, self.__dict__):
            registry.pop(name, None)
        if isinstance(value, Module):
            modules[name] = value
        elif isinstance(value, Parameter):
            parameters[name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        for registry in ("_parameters", "_modules"):
            members = self.__dict__.get(registry, {})
            if name in members:
                return members[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def register_parameter(self, name, parameter):
        """Register a parameter, or None for one that this instance goes without (a layer without bias)."""
        self._parameters[name] = parameter

    def named_children(self):
        yield from self._modules.items()

    def children(self):
        yield from self._modules.values()

    def named_modules(self, prefix=""):
        """This module and all below it, each with its dotted name."""
        yield prefix, self
        for name, child in self._modules.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self, prefix=""):
        """All parameters with their dotted names, which are the tensor names of a checkpoint."""
        for module_name, module in self.named_modules(prefix):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{module_name}.{name}" if module_name else name, parameter

    def parameters(self):
        for _, parameter in self.named_parameters():
            yield parameter


class ModuleList(Module):
    """Children named 0, 1, 2 ..."""

    def __init__(self, modules):
        super().__init__()
        for index, module in enumerate(modules):
            self._modules[str(index)] = module

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules.values())

    def __getitem__(self, index):
        return list(self._modules.values())[index]
