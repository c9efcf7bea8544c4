"""Parts of :mod:`verl.protocol`, which is the public name of everything here."""
