//! The token of the admin endpoints.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{Files, Loaded, Refused, Source, parse, rest};
use crate::config::view;

fn read(base: &Path, file: &str, files: Files) -> Result<Loaded, Refused> {
    let text = rest(&format!("admin:\n  token_file: {file}\n"));
    parse(&Source { name: "config.yaml".into(), text }, base, files)
}

fn write(base: &Path, file: &str, octets: &[u8], mode: u32) {
    let path = base.join(file);
    std::fs::write(&path, octets).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn it_is_trimmed_and_shown_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path();
    for mode in [0o600, 0o400, 0o640] {
        write(base, "token", b" 0123456789abcdef\r\n", mode);
        let plan = read(base, "token", Files::Check).unwrap().plan;
        let token = plan.admin_token.as_ref().unwrap();
        assert!(token.is(b"0123456789abcdef"));
        assert_eq!(token.path, base.join("token"));
        let shown = view(&plan);
        assert_eq!(shown["admin"]["token_file"], base.join("token").to_string_lossy().as_ref());
        assert!(!format!("{plan:?}{shown}").contains("0123456789abcdef"));
    }
    let unread = read(base, "gone", Files::Ignore).unwrap().plan.admin_token.unwrap();
    assert!(!unread.is(b""), "nothing that was not read is a token");
}

#[test]
fn one_that_is_no_secret_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path();
    write(base, "empty", b"\n", 0o600);
    write(base, "short", b"0123456789abcde\n", 0o600);
    write(base, "open", b"0123456789abcdef", 0o604);
    write(base, "writable", b"0123456789abcdef", 0o602);
    write(base, "blank", b"0123456789 abcdef", 0o600);
    write(base, "binary", b"0123456789\xffabcdef", 0o600);
    write(base, "large", &[b'x'; 5000], 0o600);
    std::fs::create_dir(base.join("folder")).unwrap();
    let files =
        ["gone", "folder", "empty", "short", "open", "writable", "blank", "binary", "large"];
    let told = files.iter().chain(&["\"\""]).map(|file| {
        let refused = read(base, file, Files::Check).unwrap_err();
        let told = refused.render(false);
        assert!(!told.contains("0123") && told.contains("config.yaml:11:"), "{told}");
        told
    });
    insta::assert_snapshot!(told.collect::<Vec<_>>().join("\n"));
}
