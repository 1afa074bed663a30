//! Long flags with one dash, as Go programs have them and as our users' scripts may: `-config=x`,
//! `-config x`, `-check`, `-check=false`.

use std::ffi::OsString;

use clap::{Arg, Command};

/// Puts the second dash before what is a long flag of the (sub)command. All else is left as it
/// is, so that the complaint about it names what was written. `command` must have been built.
pub(super) fn rewrite(arguments: Vec<OsString>, command: &Command) -> Vec<OsString> {
    let mut command = command;
    let mut out = Vec::with_capacity(arguments.len());
    let mut arguments = arguments.into_iter();
    // The name of the program.
    out.extend(arguments.next());
    while let Some(argument) = arguments.next() {
        let Some(text) = argument.to_str() else {
            out.push(argument);
            continue;
        };
        if text == "--" {
            out.push(argument);
            break;
        }
        let Some(dashed) = text.strip_prefix('-') else {
            command = command.find_subcommand(text).unwrap_or(command);
            out.push(argument);
            continue;
        };
        let name_and_value = dashed.strip_prefix('-').unwrap_or(dashed);
        let (name, value) = match name_and_value.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (name_and_value, None),
        };
        let Some(flag) = long_flag(command, name) else {
            out.push(argument);
            continue;
        };
        let takes_value = flag.get_action().takes_values();
        let value_follows = takes_value && value.is_none();
        if dashed == name_and_value {
            match value {
                // A switch of Go takes a truth value; ours does not.
                Some("true") if !takes_value => out.push(format!("--{name}").into()),
                Some("false") if !takes_value => {}
                _ => out.push(format!("--{name_and_value}").into()),
            }
        } else {
            out.push(argument);
        }
        if value_follows {
            // A value may look like a flag; it is not for us to read.
            out.extend(arguments.next());
        }
    }
    out.extend(arguments);
    out
}

fn long_flag<'c>(command: &'c Command, name: &str) -> Option<&'c Arg> {
    // One letter is a short flag.
    let mut known = command.get_arguments().filter(|_| name.len() > 1);
    known.find(|argument| argument.get_long() == Some(name))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Arguments;

    #[test]
    fn table() {
        let mut command = Arguments::command();
        command.build();
        for (written, meant) in [
            ("l7rp", "l7rp"),
            ("l7rp -config=a.yaml -check", "l7rp --config=a.yaml --check"),
            ("l7rp -config a.yaml", "l7rp --config a.yaml"),
            ("l7rp --config a.yaml -check", "l7rp --config a.yaml --check"),
            ("l7rp -config= -check", "l7rp --config= --check"),
            ("l7rp -config a=b=c", "l7rp --config a=b=c"),
            ("l7rp -config=a=b", "l7rp --config=a=b"),
            ("l7rp -help", "l7rp --help"),
            ("l7rp -version", "l7rp --version"),
            ("l7rp -h", "l7rp -h"),
            ("l7rp -V", "l7rp -V"),
            // Values are left alone, whatever they look like.
            ("l7rp -config -check", "l7rp --config -check"),
            ("l7rp --config -check", "l7rp --config -check"),
            ("l7rp --config=-check -check", "l7rp --config=-check --check"),
            ("l7rp --config demo -check", "l7rp --config demo --check"),
            // Switches with a truth value.
            ("l7rp -check=true", "l7rp --check"),
            ("l7rp -check=false -config x", "l7rp --config x"),
            ("l7rp -check=maybe", "l7rp --check=maybe"),
            ("l7rp --check=true", "l7rp --check=true"),
            // What is not known stays, for clap to name it.
            ("l7rp -confg=a.yaml", "l7rp -confg=a.yaml"),
            ("l7rp -c=a.yaml", "l7rp -c=a.yaml"),
            ("l7rp -", "l7rp -"),
            ("l7rp ---config", "l7rp ---config"),
            ("l7rp -name=one", "l7rp -name=one"),
            // Each subcommand knows its own.
            ("l7rp backend -name=one -fail-every 3", "l7rp backend --name=one --fail-every 3"),
            ("l7rp backend -config=a.yaml", "l7rp backend -config=a.yaml"),
            ("l7rp check -no-files a.yaml", "l7rp check --no-files a.yaml"),
            ("l7rp check -- -no-files", "l7rp check -- -no-files"),
            ("l7rp backend -hang -slow=5", "l7rp backend --hang --slow=5"),
            ("l7rp demo -help", "l7rp demo --help"),
        ] {
            let arguments = written.split(' ').map(OsString::from).collect();
            let read: Vec<_> = rewrite(arguments, &command);
            let read: Vec<_> = read.iter().map(|a| a.to_str().unwrap()).collect();
            assert_eq!(read.join(" "), meant, "{written}");
        }
    }

    #[test]
    fn what_is_not_unicode_is_left_alone() {
        use std::os::unix::ffi::OsStringExt;
        let mut command = Arguments::command();
        command.build();
        let arguments = vec!["l7rp".into(), "-config".into(), OsString::from_vec(vec![0xff])];
        let read = rewrite(arguments.clone(), &command);
        assert_eq!(read, ["l7rp".into(), "--config".into(), arguments[2].clone()]);
    }
}
